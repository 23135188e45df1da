"""Tells how far the clock runs ahead of the processor, where other processes want the processor, too.

A limit that is there to spare the user's patience is one by the clock. But a search that a busy machine cuts
short finds less than the same search on a quiet one; so limits that nobody has asked for are stretched.
"""

from __future__ import annotations

import os
import time

LEAST_SPENT = 0.1
"""Seconds of processor time before which nothing is said of the pace."""


class Pace:
    """Seconds that pass by the clock for one that this process and those it has waited for compute."""

    def __init__(self) -> None:
        """Begin to watch both."""
        self._clock, self._processor = time.monotonic(), _processor_seconds()

    def by_the_clock(self, seconds: float, most: float) -> float:
        """Return how long computing for some seconds takes by the clock, as far as that was seen.

        Args:
            seconds: of processor time.
            most: times as long that it may take at most.
        """
        spent = _processor_seconds() - self._processor
        if spent < LEAST_SPENT:
            return seconds
        return seconds * min(most, max(1.0, (time.monotonic() - self._clock) / spent))


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
