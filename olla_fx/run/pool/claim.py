"""What a run holds of a segment: all that its plan needs, and less while it waits for its caller."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any

from olla_fx.run.pool.segment import Range, Segment


class Way(enum.Enum):
    """What a run that goes on after it has waited finds in its place."""

    FREE = "nothing: all requests are served there"
    TAKEN = "what another run holds or has left: requests that meet it are the stock allocator's"
    BUSY = "a run under way in the same buffer, which can serve only one: all are the stock allocator's"


class Claim:
    """A run under way.

    Attributes:
        plan_owner: whose plan runs.
        segment: where it runs; None for a run on the stock allocator.
        base: the address, from the segment's first, from which it runs.
        end: that of the first byte behind what its plan needs.
        held_range: returns the part that it holds, counted from ``base``, while it waits; else None.
        is_over: True once the run is.
        thread: whose run it is.
    """

    __slots__ = "__weakref__", "base", "end", "held_range", "is_over", "plan_owner", "segment", "thread"

    def __init__(
        self, plan_owner: object, segment: Segment | None = None, base: int = 0, end: int = 0
    ) -> None:
        """Begin a run of the calling thread."""
        self.plan_owner: weakref.ref[Any] = weakref.ref(plan_owner)
        self.segment = segment
        self.base, self.end = base, end
        self.held_range: Callable[[], Range] | None = None
        self.is_over = False
        self.thread = threading.get_ident()

    @property
    def lets_others_run(self) -> bool:
        """True if it waits for the calling thread, whose other runs can use what it does not hold."""
        return self.held_range is not None and self.thread == threading.get_ident()

    @property
    def range(self) -> Range:
        """The addresses that it holds, from the segment's first."""
        held_range = self.held_range
        if held_range is None:
            return self.base, self.end
        low, high = held_range()
        return self.base + low, self.base + high
