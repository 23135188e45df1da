"""Functions in processes of their own: the last answer stands, whatever becomes of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from olla_solvers.effort import apart
from olla_solvers.effort.patience import Patience
from olla_solvers.errors import OllaError, ProblemError
from olla_solvers.order import order
from tests.olla_solvers.order.large import wide


def answers(values: list[int], offer: apart.Offer) -> None:
    for value in values:
        offer(value)


def answers_slowly(values: list[int], offer: apart.Offer) -> None:
    for value in values:
        offer(value)
        time.sleep(1.2)


def answers_then_dies(value: int, offer: apart.Offer) -> None:
    offer(value)
    os.kill(os.getpid(), signal.SIGKILL)


def answers_then_fails(value: int, offer: apart.Offer) -> None:
    offer(value)
    raise RuntimeError("out of luck")


def answers_then_hangs(value: int, offer: apart.Offer) -> None:
    offer(value)
    time.sleep(600)


def refuses(offer: apart.Offer) -> None:
    raise ProblemError("no such thing")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes find this module."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3]))


def test_the_last_answer_stands() -> None:
    assert apart.last_answer(answers, ([1, 2, 3],), 60) == 3
    assert apart.last_answer(answers, ([],), 60) is None


def test_answers_are_handed_on_while_the_process_runs() -> None:
    heard: list[int] = []
    assert apart.last_answer(answers_slowly, ([1, 2, 2, 3],), 60, heard.append) == 3
    assert heard[0] == 1
    assert heard == sorted(set(heard))


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_a_killed_process_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert apart.last_answer(answers_then_dies, (7,), 60) == 7
    assert "the best plan so far stands" in caplog.text


def test_a_failing_process_loses_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert apart.last_answer(answers_then_fails, (7,), 60) == 7
    assert "out of luck" in caplog.text


def test_a_late_process_is_ended_and_loses_nothing() -> None:
    assert apart.last_answer(answers_then_hangs, (7,), 8) == 7


def test_errors_of_the_package_are_raised_here() -> None:
    with pytest.raises(ProblemError, match="no such thing") as raised:
        apart.last_answer(refuses, (), 60)
    assert isinstance(raised.value, OllaError)


def test_without_processes_the_plan_so_far_stands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: object, **more: object) -> None:
        raise OSError("no processes here")

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert apart.last_answer(answers, ([1],), 60) is None
    assert "no processes here" in caplog.text


def test_ordering_keeps_its_order_when_the_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = wide(60, 20)
    quick = order(problem, time_limit=0)
    lost = f"import os, signal; os.kill(os.getpid(), {int(signal.SIGTERM)})"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **more: start([sys.executable, "-c", lost], **more)
    )
    schedule = order(problem, time_limit=20)
    assert problem.is_executable(schedule.order)
    assert schedule.peak_bytes <= quick.peak_bytes


def test_a_process_goes_on_from_a_known_order() -> None:
    from olla_solvers.order import go_on

    problem = wide(60, 20)
    known = order(problem, time_limit=0)
    better = apart.last_answer(go_on, (problem, known, "precedence bound", Patience.of(6.0), 6.0), 30)
    assert better.peak_bytes <= known.peak_bytes
    assert better.lower_bound_bytes >= known.lower_bound_bytes
    assert better.progress[: len(known.progress)] == known.progress


RESIDUE = """
import sys
import olla_solvers.planner
from tests.olla_solvers.order.large import wide

def resident() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20

problem = wide(2000, 300)
problem.captured_order
begin = resident()
plan = olla_solvers.planner.make_plan(problem, time_limit=8)
print(resident() - begin, plan.peak_bytes > plan.lower_bound_bytes, "numba" in sys.modules)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_planning_leaves_little_behind() -> None:
    """With the search's states in the caller it was hundreds of megabytes, and with numba one more."""
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "solvers")])}
    output = subprocess.run(
        [sys.executable, "-c", RESIDUE], env=environment, check=True, capture_output=True, text=True
    ).stdout
    megabytes, is_open, has_numba = output.split()
    assert float(megabytes) <= 50
    assert (is_open, has_numba) == ("True", "False")


KILLED = """
import sys
from tests.olla_solvers.effort.test_apart import tells_who_it_is_then_hangs
from olla_solvers.effort import apart

apart.last_answer(tells_who_it_is_then_hangs, (sys.argv[1],), 600)
"""


def tells_who_it_is_then_hangs(path: str, offer: apart.Offer) -> None:
    Path(path).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(600)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_ends_with_its_caller(tmp_path: Path) -> None:
    told = tmp_path / "process"
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "solvers")])}
    caller = subprocess.Popen([sys.executable, "-c", KILLED, str(told)], env=environment)
    wait_until(lambda: told.exists() and told.read_text(encoding="utf-8") != "")
    caller.kill()
    caller.wait()
    process = Path("/proc", told.read_text(encoding="utf-8"), "cmdline")
    wait_until(lambda: not process.exists() or not process.read_bytes())


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
