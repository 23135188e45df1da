"""Says for how long a planner goes on: as long as enough can still be gained, and to its deadline.

A plan whose value lies a little above its bound may be searched for hours without being improved. So without
being asked for more, a planner works for a first second on any gap, and beyond it only while the gap is above
both half a percent and a mebibyte. If the user gives a time limit or names a solver, it goes on to a proof.

The first second is counted in processor time of the working thread, so that what a plan is depends as
little as can be on what else runs on the machine; the deadline is one of wall-clock time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from olla_solvers.arrays import Bytes

DEFAULT_SECONDS = 9.0
"""Time limit for ordering and placing together, if none is given."""

FIRST_SECONDS = 1.0
"""Processor time for which any gap is worked on."""

LEAST_SHARE = 0.005
LEAST_BYTES = 1 << 20
"""Beyond the first second a gap must be above this share of the value and above so many bytes."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The time that a search may take, by what it can still gain.

    Attributes:
        deadline: on the monotonic clock, which all processes of a machine share.
        first_until: the end of the first second, on this thread's clock of processor time.
        least_share: beyond the first second, the share of the value that a gap must exceed.
        least_bytes: likewise, in bytes.
    """

    deadline: float
    first_until: float = -math.inf
    least_share: float = LEAST_SHARE
    least_bytes: Bytes = LEAST_BYTES

    @classmethod
    def of(cls, time_limit: float | None, *, insists: bool = False) -> Patience:
        """Return the patience for a user's time limit, from now on.

        Args:
            time_limit: seconds, for a proof; None for the default, and no longer than it pays.
            insists: True to go on to a proof without a time limit, too.
        """
        seconds = DEFAULT_SECONDS if time_limit is None else time_limit
        patience = cls(time.monotonic() + seconds).with_first_second()
        return patience if time_limit is None and not insists else patience.insisting()

    @classmethod
    def until(cls, deadline: float) -> Patience:
        """Return the patience to go on to a proof or a deadline."""
        return cls(deadline).insisting()

    @property
    def insists(self) -> bool:
        """True if any gap is worth all the time there is."""
        return self.least_share == 0.0 and self.least_bytes == 0

    def insisting(self) -> Patience:
        """Return the same, for any gap."""
        return replace(self, least_share=0.0, least_bytes=0)

    def with_first_second(self) -> Patience:
        """Return the same with a first second that begins now, on this thread."""
        return replace(self, first_until=time.thread_time() + FIRST_SECONDS)

    def beyond_first_second(self) -> Patience:
        """Return the same for a process that goes on after the first second."""
        return replace(self, first_until=-math.inf)

    def first_second_only(self) -> Patience:
        """Return the same without anything beyond the first second."""
        return replace(self, least_share=1.0)

    def part(self, share: float) -> Patience:
        """Return the same with an earlier deadline, after a share of what is left."""
        return replace(self, deadline=time.monotonic() + share * self.seconds())

    def seconds(self) -> float:
        """Return the seconds left until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def is_worth(self, value_bytes: Bytes, bound_bytes: Bytes) -> bool:
        """Return True if a gap is worth more than the first second."""
        gap = value_bytes - bound_bytes
        return gap > 0 and gap > max(self.least_share * value_bytes, self.least_bytes)

    def lasts(self, value_bytes: Bytes, bound_bytes: Bytes) -> bool:
        """Return True if a search is to go on.

        Args:
            value_bytes: of the best answer so far.
            bound_bytes: proven: no answer is smaller.
        """
        if value_bytes <= bound_bytes or time.monotonic() > self.deadline:
            return False
        return time.thread_time() <= self.first_until or self.is_worth(value_bytes, bound_bytes)
