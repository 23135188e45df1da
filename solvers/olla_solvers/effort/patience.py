"""Says for how long a planner goes on: as long as enough can still be gained, and to its deadline.

A plan whose value lies a little above its bound may be searched for hours without being improved. So without
being asked for more, a planner works for a first second on any gap, and beyond it only while the gap is above
both half a percent and a mebibyte. If the user gives a time limit or names a solver, it goes on to a proof.

The first second, and the limit if the user gives none, are counted in processor time of the working thread,
so that a plan depends as little as can be on what else runs on the machine. A user's limit is one of
wall-clock time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from olla_solvers.arrays import Bytes

DEFAULT_SECONDS = 9.0
"""Processor time for ordering and placing together, if no limit is given."""

LATEST = 3.0
"""Factor on it for the deadline: on a machine so busy, planning ends by the clock."""

FIRST_SECONDS = 1.0
"""Processor time for which any gap is worked on."""

QUICK_SECONDS = 0.4
"""Processor time for an answer that is compared with others, of which one will be worked on further."""

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
        work_until: where to end on this thread's clock of processor time.
        enough_bytes: a value that is no larger is good enough, whatever the gap.
    """

    deadline: float
    first_until: float = -math.inf
    least_share: float = LEAST_SHARE
    least_bytes: Bytes = LEAST_BYTES
    work_until: float = math.inf
    enough_bytes: Bytes = 0

    @classmethod
    def of(cls, time_limit: float | None, *, insists: bool = False) -> Patience:
        """Return the patience for a user's time limit, from now on.

        Args:
            time_limit: seconds, for a proof; None for the default, and no longer than it pays.
            insists: True to go on to a proof without a time limit, too.
        """
        now, worked = time.monotonic(), time.thread_time()
        first_until = worked + FIRST_SECONDS
        if time_limit is not None or insists:
            seconds = DEFAULT_SECONDS if time_limit is None else time_limit
            return cls(now + seconds, first_until).insisting()
        return cls(now + LATEST * DEFAULT_SECONDS, first_until, work_until=worked + DEFAULT_SECONDS)

    @classmethod
    def quick(cls) -> Patience:
        """Return the patience for an answer that is only compared with others."""
        worked = time.thread_time()
        return cls(time.monotonic() + LATEST * QUICK_SECONDS, worked + QUICK_SECONDS, least_share=1.0)

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

    def handed_over(self, processor_seconds: float) -> Patience:
        """Return the same for a process that goes on after the first second, on the clock of its thread.

        Args:
            processor_seconds: what was left of them where it was handed over.
        """
        return replace(self, first_until=-math.inf, work_until=time.thread_time() + processor_seconds)

    def first_second_only(self) -> Patience:
        """Return the same without anything beyond the first second."""
        return replace(self, least_share=1.0)

    def part(self, share: float) -> Patience:
        """Return the same with an earlier deadline, after a share of what is left."""
        deadline = time.monotonic() + share * self.seconds()
        return replace(
            self, deadline=deadline, work_until=time.thread_time() + share * self.processor_seconds()
        )

    def next_look(self) -> float:
        """Return when to ask again, on the monotonic clock: at the earliest end of the first second."""
        left = self.first_until - time.thread_time()
        return min(self.deadline, time.monotonic() + left) if left > 0 else self.deadline

    def processor_seconds(self) -> float:
        """Return the processor time left, at least 0."""
        return max(0.0, self.work_until - time.thread_time())

    def seconds(self) -> float:
        """Return the seconds left until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def is_worth(self, value_bytes: Bytes, bound_bytes: Bytes) -> bool:
        """Return True if a gap is worth more than the first second."""
        gap = value_bytes - bound_bytes
        return (
            value_bytes > self.enough_bytes
            and gap > 0
            and gap > max(self.least_share * value_bytes, self.least_bytes)
        )

    def lasts(self, value_bytes: Bytes, bound_bytes: Bytes) -> bool:
        """Return True if a search is to go on.

        Args:
            value_bytes: of the best answer so far.
            bound_bytes: proven: no answer is smaller.
        """
        worked = time.thread_time()
        if value_bytes <= max(bound_bytes, self.enough_bytes):
            return False
        if time.monotonic() > self.deadline or worked > self.work_until:
            return False
        return worked <= self.first_until or self.is_worth(value_bytes, bound_bytes)
