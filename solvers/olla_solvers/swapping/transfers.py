"""What waits in host memory, when, and over which link.

Timesteps are positions in a sequence of executions. The moment in front of a timestep is its *boundary*; what
happens there comes in this sequence: copies out begin for what the timestep before has accessed last, copies
out are waited for, copies in begin, copies in are waited for. So a boundary's copy in may use memory that a
copy out leaves there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.errors import ProblemError
from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import ArrayIndex, Seconds


@dataclass(frozen=True)
class Link:
    """What copies between device and host, in both directions at once and one array after the other in each.

    Attributes:
        out_bytes_per_second: from device to host.
        in_bytes_per_second: from host to device.
        latency_seconds: of each copy, beside its bytes.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        """Check the speeds.

        Raises:
            ProblemError: if nothing would be copied.
        """
        speeds = self.out_bytes_per_second, self.in_bytes_per_second
        if not all(speed > 0 for speed in speeds) or not 0 <= self.latency_seconds < math.inf:
            raise ProblemError(f"a link copies bytes in every second, and starts in finite time: {self}")

    def out_seconds(self, size_bytes: Bytes) -> Seconds:
        """Return the seconds in which an array is copied to the host."""
        return self.latency_seconds + size_bytes / self.out_bytes_per_second

    def in_seconds(self, size_bytes: Bytes) -> Seconds:
        """Return the seconds in which an array is copied to the device."""
        return self.latency_seconds + size_bytes / self.in_bytes_per_second


@dataclass(frozen=True, order=True, slots=True)
class Transfer:
    """One array's stay in host memory.

    Timesteps beyond the sequence's end are those of the next step, which is the same sequence again: what
    belongs to the caller, a weight say, may be away between two steps.

    Attributes:
        out_after: copying out is asked for when this timestep has run: the last one that accesses it before,
            or a later one.
        gone_before: in front of this timestep the copy is waited for; the array's memory is free from it on.
        back_from: in front of this timestep its memory is needed again, and copying in is asked for.
        back_before: in front of this timestep the copy is waited for; the first one that accesses it again.
        array: which.
        copy: 0 for what the step's own operators make, else the repetition that makes it.
    """

    out_after: Timestep
    gone_before: Timestep
    back_from: Timestep
    back_before: Timestep
    array: ArrayIndex
    copy: int = 0


def check(transfers: Sequence[Transfer], timesteps: int) -> None:
    """Check that each array is copied out before it is away, and in afterwards, within a step's time.

    Args:
        transfers: any.
        timesteps: of the step.

    Raises:
        ProblemError: naming the first transfer for which that is not so.
    """
    for transfer in transfers:
        out, gone = transfer.out_after, transfer.gone_before
        back, needed = transfer.back_from, transfer.back_before
        if not (0 <= out < timesteps and out < gone < back <= needed <= out + timesteps):
            raise ProblemError(f"a step of {timesteps} timesteps has no time for {transfer}")


def away_bytes(transfers: Sequence[Transfer], sizes: Sequence[Bytes], timesteps: int) -> list[Bytes]:
    """Return for each timestep the bytes of what is away from the device.

    Args:
        transfers: of a step.
        sizes: of each transfer's array.
        timesteps: of the step.
    """
    spans = [(transfer.gone_before, transfer.back_from) for transfer in transfers]
    return _sums(spans, sizes, timesteps)


def host_bytes(transfers: Sequence[Transfer], sizes: Sequence[Bytes], timesteps: int) -> list[Bytes]:
    """Return for each timestep's boundary the bytes that are needed on the host.

    Args:
        transfers: of a step.
        sizes: of each transfer's array.
        timesteps: of the step.
    """
    spans = [(transfer.out_after + 1, transfer.back_before + 1) for transfer in transfers]
    return _sums(spans, sizes, timesteps)


def _sums(spans: Sequence[tuple[int, int]], sizes: Sequence[Bytes], timesteps: int) -> list[Bytes]:
    sums = [0] * timesteps
    for (first, end), size in zip(spans, sizes, strict=True):
        for timestep in range(first, end):
            sums[timestep % timesteps] += size
    return sums
