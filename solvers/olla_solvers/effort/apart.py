"""Runs a function of this package in a process of its own, which hands over every improvement at once.

What takes much memory (states of a search, compiled code) is gone with its process, and the caller's memory
and imports stay as they were. The process is started as ``python -m olla_solvers.effort.apart request
answer`` in an empty folder; it imports neither the caller's main module nor anything that the function
does not need.
An answer is a file that each better one replaces whole: whenever the process ends, is ended at its deadline
or is killed, the last answer stands.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from olla_solvers.errors import OllaError

_LOGGER = logging.getLogger(__name__)

_GRACE_SECONDS = 0.5
"""Time beyond a process's limit in which it may end by itself."""

_LOOK_SECONDS = 0.5
"""How often the caller looks for a better answer, if it wants to hear of them."""

LEAST_SECONDS = 2.0
"""A process is not started for less: it would hardly have begun."""

_LEAST_PAUSE, _PAUSES = 1.0, 10
"""Seconds between two answers that take a while to make, and times as many as the last one took."""

Offer: TypeAlias = Callable[[Any], None]
"""Hands over an answer that is better than those before."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """An answer that is an error of this package, for the caller to raise."""

    error: OllaError


def last_answer(
    function: Callable[..., None],
    arguments: Sequence[Any],
    seconds: float,
    on_answer: Callable[[Any], None] | None = None,
) -> Any | None:
    """Run a function in a process of its own and return the last answer that it offered.

    Args:
        function: of a module of this package; called with the arguments and an :data:`Offer`.
        arguments: what can be pickled.
        seconds: wall-clock time, after which the process is ended.
        on_answer: called with answers meanwhile; of several within half a second, with the last.

    Returns:
        The last answer; None if there is none, or no process can be started here.

    Raises:
        OllaError: as the function did.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="olla_solvers_") as folder:
            Path(folder, "request").write_bytes(pickle.dumps((function, tuple(arguments))))
            module_arguments = ("request", "answer")
            answered = Path(folder, "answer")
            look = None if on_answer is None else _looking(answered, on_answer)
            code, words = run_module("olla_solvers.effort.apart", module_arguments, folder, seconds, look)
            answer = pickle.loads(answered.read_bytes()) if answered.exists() else None
    except OSError as error:
        _LOGGER.warning("no process to plan in can be started; the plan found so far stands (%s)", error)
        return None
    if code:
        last_words = words.strip().splitlines()[-1:] or ["without a word"]
        _LOGGER.warning(
            "planning in a process of its own ended with status %d (%s); the best plan so far stands",
            code, last_words[0],
        )  # fmt: skip
    if isinstance(answer, _Refused):
        raise answer.error
    return answer


def _looking(answered: Path, on_answer: Callable[[Any], None]) -> Callable[[], None]:
    """Return a function that hands an answer's file on if it is another one than before."""
    seen: list[bytes] = [b""]

    def look() -> None:
        written = answered.read_bytes() if answered.exists() else b""
        if written != seen[0]:
            seen[0] = written
            answer = pickle.loads(written)
            if not isinstance(answer, _Refused):
                on_answer(answer)

    return look


def run_module(
    module: str,
    arguments: Sequence[str],
    folder: str,
    seconds: float | None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[int | None, str]:
    """Run a module of this package in a process of its own, and end it with all it started when it is late.

    Args:
        module: its full name.
        arguments: for its command line.
        folder: where it works.
        seconds: wall-clock time; a moment after, the process is ended. None for no limit.
        meanwhile: called every half a second while the process runs.

    Returns:
        Its exit status, None if it had to be ended, and its error output.
    """
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, sys.path)]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = math.inf if seconds is None else time.monotonic() + seconds + _GRACE_SECONDS
    try:
        words = _last_words(process, end, meanwhile)
    finally:
        _end(process)
    return (None, "") if words is None else (process.returncode, words[-500:])


def _last_words(
    process: subprocess.Popen[str], end: float, meanwhile: Callable[[], None] | None
) -> str | None:
    """Wait for a process; return its error output, or None at its end on the monotonic clock."""
    while (left := end - time.monotonic()) > 0:
        wait = left if meanwhile is None else min(left, _LOOK_SECONDS)
        try:
            return process.communicate(timeout=None if wait == math.inf else wait)[1]
        except subprocess.TimeoutExpired:
            if meanwhile is not None:
                meanwhile()
    return None


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and what it started."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        # It may have ended since it was asked.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


def at_times(report: Callable[[], None]) -> Callable[[], None]:
    """Return a function that reports when it is called, but only now and then.

    Args:
        report: makes an answer and offers it, which takes a while.
    """
    next_report = 0.0

    def maybe_report() -> None:
        nonlocal next_report
        began = time.monotonic()
        if began >= next_report:
            report()
            ended = time.monotonic()
            next_report = ended + max(_LEAST_PAUSE, _PAUSES * (ended - began))

    return maybe_report


def end_with_caller() -> None:
    """End this process once the one that started it is gone, which ends it in time only while it lives."""
    caller = os.getppid()

    def watch() -> None:
        while os.getppid() == caller:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(request_path: str, answer_path: str) -> None:
    """Serve one request.

    Args:
        request_path: a pickled function and its arguments.
        answer_path: where each answer is put, pickled.
    """

    def offer(answer: Any) -> None:
        part = Path(f"{answer_path}.part")
        part.write_bytes(pickle.dumps(answer))
        part.replace(answer_path)

    end_with_caller()
    function, arguments = pickle.loads(Path(request_path).read_bytes())
    try:
        function(*arguments, offer)
    except OllaError as error:
        offer(_Refused(error))


if __name__ == "__main__":
    # By its full name, so that what is pickled here is found by that name there.
    from olla_solvers.effort import apart

    apart.main(*sys.argv[1:])
