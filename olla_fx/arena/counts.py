"""Counts a step's allocation requests, and names the place of its arrays."""

from __future__ import annotations

import enum
import operator
from typing import NamedTuple


class Binding(enum.StrEnum):
    """The memory of a step's arrays: the planned buffer, or the stock allocator's."""

    BUFFER = "buffer"
    STOCK = "stock"


class RunCounts(NamedTuple):
    """Allocation requests of one run.

    Attributes:
        served: served from the buffer.
        served_bytes: their bytes.
        outputs: served outside on purpose: what the caller gets, and persistent blocks.
        outside: of the planning thread, expected in the buffer but served outside.
        outside_bytes: their bytes.
        requests_on_worker_threads: made by other threads, or by this one on another stream or device than
            the step's; these are never served.
    """

    served: int = 0
    served_bytes: int = 0
    outputs: int = 0
    outside: int = 0
    outside_bytes: int = 0
    requests_on_worker_threads: int = 0

    def and_those_of(self, other: RunCounts) -> RunCounts:
        """Add the counts of two phases up."""
        return RunCounts(*map(operator.add, self, other))
