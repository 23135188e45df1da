"""The user's time limit, which the plans made in one call share.

A call may make several: of a step's micro-batches and of the update after them, and again of both once a run
was recorded. They are made one after the other; each may take an equal part of what is left, and what it
does not need goes to those after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class TimeLimit:
    """Seconds of ordering and placing that are left to the plans of one call."""

    def __init__(self, seconds: float | None, plans: int = 1) -> None:
        """Take the user's limit; no time passes until a plan is made.

        Args:
            seconds: the limit; None for no limit of the user's.
            plans: the number of plans that are to come.
        """
        self._left_seconds = seconds
        self._plans = plans

    def expect(self, plans: int) -> None:
        """Count more plans as still to come."""
        self._plans += plans

    @contextlib.contextmanager
    def next_plan(self) -> Iterator[float | None]:
        """Make the next plan in this context, which yields its limit in seconds."""
        part = None if self._left_seconds is None else self._left_seconds / max(1, self._plans)
        self._plans -= 1
        started = time.monotonic()
        try:
            yield part
        finally:
            if self._left_seconds is not None:
                self._left_seconds = max(0.0, self._left_seconds - (time.monotonic() - started))
