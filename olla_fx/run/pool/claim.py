"""What a run holds of a segment: all that its plan needs, and less while it waits for its caller."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from olla_fx.run.pool.segment import Range, Segment


class Way(enum.Enum):
    """What a run that goes on after it has waited finds in its place."""

    FREE = "free"
    TAKEN = "something that another run holds, so that not all requests can be served there"
    BUSY = "another thread's run in the same buffer, which can serve only one"


HeldRange: TypeAlias = Callable[[], Range]
"""Returns the part of a claim that is held while its run waits."""


class Claim:
    """A run under way.

    Attributes:
        plan_owner: whose plan runs.
        segment: where it runs; None for a run on the stock allocator.
        base: the address, from the segment's first, from which it runs.
        end: that of the first byte behind what its plan needs.
        held: the part from ``base`` on that it holds while it waits; None unless it waits.
    """

    __slots__ = "__weakref__", "_thread", "base", "end", "held", "plan_owner", "segment"

    def __init__(
        self, plan_owner: object, segment: Segment | None = None, base: int = 0, end: int = 0
    ) -> None:
        """Begin a run of the calling thread."""
        self.plan_owner: weakref.ref[Any] = weakref.ref(plan_owner)
        self.segment = segment
        self.base, self.end = base, end
        self.held: HeldRange | None = None
        self._thread = threading.get_ident()

    @property
    def lets_others_run(self) -> bool:
        """True if it waits for the calling thread, whose other runs can use what it does not hold."""
        return self.held is not None and self._thread == threading.get_ident()

    @property
    def range(self) -> Range:
        """The addresses that it holds, from the segment's first."""
        held = self.held
        if held is None:
            return self.base, self.end
        low, high = held()
        return self.base + low, self.base + high
