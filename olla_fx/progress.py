"""Says what planning is doing while it takes long: a line on a terminal, lines in the log.

Most plans are made in a moment, and nothing is said. After :data:`QUIET_SECONDS` a thread of its own begins
to show the seconds, the stage, its operators, and the best value and bound so far. tqdm draws the line:
loops that train have bars of its, and it gives each its place. It has no dependencies, and is imported when
something is to be drawn. Where the error output is no terminal (a pipe, a file, a notebook) or belongs to
continuous integration, nothing is drawn.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

from olla_fx.report import format_bytes
from olla_solvers.effort.progress import Improvement

logger = logging.getLogger(__name__)

QUIET_SECONDS = 2.0
"""Planning that takes no longer says nothing."""

_TICK_SECONDS = 0.5


class Progress:
    """What a planning is doing; a context that says so once it takes long."""

    def __init__(self) -> None:
        """Begin to count the seconds."""
        self._started = time.monotonic()
        self._stage = "capture"
        self._subject: str | None = None
        self._improvement: Improvement | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start to watch, if anybody would see it."""
        if _is_terminal() or logger.isEnabledFor(logging.INFO):
            self._thread = threading.Thread(target=self._tell, name="olla_fx progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the line away; the log gets a last one."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if error is None and self._seconds() > QUIET_SECONDS:
            logger.info("planned %s in %.1f s", self._subject or "a step", self._seconds())

    def begin(self, stage: str, subject: str | None = None) -> None:
        """Note that a stage begins.

        Args:
            stage: its name.
            subject: what is planned, such as ``12 operators``, from the stage on that knows it.
        """
        self._stage, self._improvement = stage, None
        self._subject = subject or self._subject

    def note(self, stage: str, improvement: Improvement) -> None:
        """Note what ordering or placing has found; an observer of :func:`~olla_solvers.planner.make_plan`."""
        self._stage, self._improvement = stage, improvement

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _line(self) -> str:
        # Read once each: the planning thread may change them meanwhile.
        subject, best = self._subject, self._improvement
        line = f"{self._seconds():.0f} s: {self._stage}{f' of {subject}' if subject else ''}"
        if best is None:
            return line
        return f"{line}, {format_bytes(best.value_bytes)} so far, at least {format_bytes(best.bound_bytes)}"

    def _tell(self) -> None:
        """Draw and log until planning is over; what the thread runs."""
        if self._is_over.wait(QUIET_SECONDS):
            return
        bar = _bar() if _is_terminal() else None
        logged = None
        while True:
            line = self._line()
            if bar is not None:
                bar.set_description_str(f"olla_fx plans, {line}")
            if self._stage != logged:
                logged = self._stage
                logger.info("planning, %s", line)
            if self._is_over.wait(_TICK_SECONDS):
                break
        if bar is not None:
            bar.close()


def _is_terminal() -> bool:
    stream = sys.stderr
    return stream is not None and stream.isatty() and not os.environ.get("CI")


def _bar() -> Any:
    """Return a line on the terminal, beneath the bars that are there, which goes when it is closed."""
    from tqdm import tqdm

    return tqdm(bar_format="{desc}", leave=False, dynamic_ncols=True, file=sys.stderr)
