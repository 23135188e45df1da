"""Planning that takes long is heard: on a terminal, in the log, and nowhere else."""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx import progress
from olla_fx.progress import Progress
from olla_solvers.effort.progress import Improvement

ROOT = Path(__file__).resolve().parents[2]

PLANNING = """
import sys, time
import torch, olla_fx

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(float(sys.argv[1]))
        return super().forward(x)

print(olla_fx.plan(Slow(3, 3).eval(), torch.ones(2, 3), baseline=False).peak_bytes)
"""

SEARCHING = """
from functools import partial
from olla_fx.progress import Progress
from olla_solvers.order import order
from tests.olla_solvers.order.large import wide

with Progress() as progress:
    progress.begin("order", "300 operators")
    order(wide(300, 60), time_limit=6, observer=partial(progress.note, "order"))
"""


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "solvers")))
    kept = {name: value for name, value in os.environ.items() if name != "CI"}
    return {**kept, "PYTHONPATH": paths, "TERM": "xterm", **more}


def shown_on_terminal(code: str, *arguments: str, **more: str) -> str:
    """Run code with a terminal as its error output; return what was written to it."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stderr=slave, stdout=subprocess.DEVNULL, env=environment(**more), cwd=ROOT,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 4096):
            shown += part
    except OSError:
        pass  # how Linux says that nobody holds the terminal any more
    finally:
        os.close(master)
    assert process.wait() == 0, shown
    return shown.decode()


def test_a_terminal_shows_one_line_and_takes_it_away() -> None:
    shown = shown_on_terminal(PLANNING, "3")
    lines = [line.strip() for line in shown.split("\r") if line.strip()]
    assert lines[0] == "olla_fx plans, 2 s: capture"
    assert "\n" not in shown
    assert shown.split("\r")[-2:] == [" " * len(lines[-1]), ""]


def test_a_terminal_shows_what_a_process_of_its_own_finds() -> None:
    shown = shown_on_terminal(SEARCHING)
    assert "s: order of 300 operators, " in shown
    assert " so far, at least " in shown


@pytest.mark.parametrize(("seconds", "more"), [("0", {}), ("3", {"CI": "true"})], ids=["short", "CI"])
def test_a_terminal_stays_as_it_is(seconds: str, more: dict[str, str]) -> None:
    assert shown_on_terminal(PLANNING, seconds, **more) == ""


def test_a_pipe_stays_quiet() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, "3"],
        capture_output=True, text=True, env=environment(), cwd=ROOT, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.strip().isdigit()


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return super().forward(x)


def test_the_log_has_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.2)
    with caplog.at_level(logging.INFO, logger="olla_fx"):
        olla_fx.plan(Slow(3, 3).eval(), torch.ones(2, 3))
    heard = [record.getMessage() for record in caplog.records if record.name == "olla_fx.progress"]
    assert heard[0] == "planning, 0 s: capture"
    assert heard[-1].startswith("planned 1 operators in ")


def test_the_log_has_value_and_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.1)
    with caplog.at_level(logging.INFO, logger="olla_fx"), Progress() as planning:
        planning.begin("order", "3 operators")
        planning.note("place", Improvement(0.0, 5, 4, "skyline"))
        time.sleep(0.3)
    assert "planning, 0 s: place of 3 operators, 5 B so far, at least 4 B" in caplog.text


def test_planning_that_is_short_or_unheard_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="olla_fx"), Progress() as planning:
        assert planning._thread is None
    with caplog.at_level(logging.INFO, logger="olla_fx"), Progress() as planning:
        assert planning._thread is not None
    assert not planning._thread.is_alive()
    assert not [record for record in caplog.records if record.name == "olla_fx.progress"]
