"""Ends a computation at its deadline."""

from __future__ import annotations

import time


class DeadlinePassedError(Exception):
    """Raised inside a computation whose time is over; never leaves this package."""


def check_time(deadline: float) -> None:
    """Check the deadline.

    Raises:
        DeadlinePassedError: if ``time.monotonic()`` is past the deadline.
    """
    if time.monotonic() > deadline:
        raise DeadlinePassedError
