"""When arrays are copied out and in: the fixed rules of section 4.5 and 4.6 of the paper.

Copying out begins when it was asked for. An operator that needs the room waits for it ("We will not malloc
new variables before the GPU memory has enough space"); otherwise the memory counts as free from the first
operator on that begins after the copy's end.

Copying in follows the sequence of the next accesses ("We first prefetch the earliest reused variable which is
not in the GPU memory and then the second earliest reused variable"). It is asked for at the first operator
during which the link gets free, once the array fits until its access ("If swapping in a variable does not
cause any excess of memory usage until the end of the backpropagation, we will begin to prefetch the
variable"), and at its access at the latest, which waits ("If a GPU operation requires a variable, we need to
suspend GPU operations before finishing prefetching the variable").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.swapping.environment.layout import Numbers
from olla_solvers.swapping.transfers import Link, Transfer


@dataclass(frozen=True, order=True, slots=True)
class Stay:
    """An array that shall wait in host memory; more than one timestep passes between both accesses.

    Attributes:
        needed: the timestep that accesses it next.
        array: which.
        out_after: the timestep after which copying out is asked for.
        size_bytes: of it.
    """

    needed: Timestep
    array: ArrayIndex
    out_after: Timestep
    size_bytes: Bytes


@dataclass(frozen=True)
class Timetable:
    """When everything happens.

    Attributes:
        transfers: in the sequence in which they are copied in; none for a stay without time.
        begins: for each timestep the second at which its operator begins, and the last one's end.
        out_ends: for each transfer the second at which its copy out ends.
    """

    transfers: tuple[Transfer, ...]
    begins: tuple[Seconds, ...]
    out_ends: tuple[Seconds, ...]

    @property
    def seconds(self) -> Seconds:
        """Of the whole step."""
        return self.begins[-1]


def least_bytes(resident_bytes: Numbers, stays: Sequence[Stay]) -> Numbers:
    """Return the bytes of each timestep if arrays are away as long as they can be.

    Args:
        resident_bytes: if nothing is away.
        stays: what is.
    """
    least = resident_bytes.copy()
    for stay in stays:
        least[stay.out_after + 1 : stay.needed] -= stay.size_bytes
    return least


def timetable(
    seconds: Sequence[Seconds], resident_bytes: Numbers, stays: Sequence[Stay], link: Link, limit_bytes: Bytes
) -> Timetable:
    """Return when arrays are copied.

    Args:
        seconds: of each timestep.
        resident_bytes: of each timestep if nothing is away.
        stays: what shall be away.
        link: which copies.
        limit_bytes: what is never passed, unless no timetable of these stays could do without: then it is
            the least that one needs.
    """
    stays = sorted(stays)
    limit_bytes = max(limit_bytes, int(least_bytes(resident_bytes, stays).max(initial=0)))
    transfers = _leave(seconds, resident_bytes, stays, link, limit_bytes)
    return _return(seconds, resident_bytes, transfers, stays, link, limit_bytes)


def _leave(
    seconds: Sequence[Seconds], resident_bytes: Numbers, stays: Sequence[Stay], link: Link, limit_bytes: Bytes
) -> list[Transfer]:
    """Return transfers that leave as they can, and come back without time at their access."""
    used = resident_bytes.copy()
    asked = _by_timestep([stay.out_after for stay in stays])
    gone = [0] * len(stays)
    pending: deque[tuple[Seconds, int]] = deque()
    now = free = 0.0
    for timestep, own in enumerate(seconds):
        while pending:
            end, first = pending[0]
            is_last_chance = any(stays[index].needed <= timestep + 1 for _, index in pending)
            if end > now and used[timestep] <= limit_bytes and not is_last_chance:
                break
            pending.popleft()
            now = max(now, end)
            gone[first] = timestep
            used[timestep : stays[first].needed] -= stays[first].size_bytes
        now += own
        for index in asked.get(timestep, ()):
            free = max(now, free) + link.out_seconds(stays[index].size_bytes)
            pending.append((free, index))
    return [
        Transfer(stay.out_after, gone[index], stay.needed, stay.needed, stay.array)
        for index, stay in enumerate(stays)
    ]


def _return(
    seconds: Sequence[Seconds],
    resident_bytes: Numbers,
    transfers: Sequence[Transfer],
    stays: Sequence[Stay],
    link: Link,
    limit_bytes: Bytes,
) -> Timetable:
    """Ask for copies in as early as they may be; the clocks are those of the simulator."""
    used = resident_bytes.copy()
    for transfer, stay in zip(transfers, stays, strict=True):
        used[transfer.gone_before : stay.needed] -= stay.size_bytes
    asked_out = _by_timestep([transfer.out_after for transfer in transfers])
    waited_out = _by_timestep([transfer.gone_before for transfer in transfers])
    out_ends, in_ends, back = [0.0] * len(stays), [0.0] * len(stays), [stay.needed for stay in stays]
    begins = []
    now = out_free = in_free = 0.0
    following = awaited = 0
    for timestep, own in enumerate(seconds):
        for index in waited_out.get(timestep, ()):
            now = max(now, out_ends[index])
        while following < len(stays):
            stay = stays[following]
            if stay.needed > timestep and (
                transfers[following].gone_before >= timestep
                or in_free > now + own
                or used[timestep : stay.needed].max() + stay.size_bytes > limit_bytes
            ):
                break
            back[following] = timestep
            used[timestep : stay.needed] += stay.size_bytes
            in_free = max(now, in_free) + link.in_seconds(stay.size_bytes)
            in_ends[following] = in_free
            following += 1
        while awaited < len(stays) and stays[awaited].needed == timestep:
            now = max(now, in_ends[awaited])
            awaited += 1
        begins.append(now)
        now += own
        for index in asked_out.get(timestep, ()):
            out_free = max(now, out_free) + link.out_seconds(stays[index].size_bytes)
            out_ends[index] = out_free
    returning = [replace(transfer, back_from=at) for transfer, at in zip(transfers, back, strict=True)]
    return Timetable(tuple(returning), (*begins, now), tuple(out_ends))


def _by_timestep(timesteps: Sequence[Timestep]) -> dict[Timestep, list[int]]:
    named: dict[Timestep, list[int]] = {}
    for index, timestep in enumerate(timesteps):
        named.setdefault(timestep, []).append(index)
    return named
