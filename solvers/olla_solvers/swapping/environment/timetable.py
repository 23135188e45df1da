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
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.environment.layout import Numbers
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.transfers import Link, Transfer


@dataclass(frozen=True)
class Timetable:
    """When everything happens.

    Attributes:
        transfers: in the sequence in which they are copied in; none for a gap without time.
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


def least_bytes(resident_bytes: Numbers, gaps: Sequence[Gap]) -> Numbers:
    """Return the bytes of each timestep if arrays are away as long as they can be.

    Args:
        resident_bytes: if nothing is away.
        gaps: what is.
    """
    least = resident_bytes.copy()
    for gap in gaps:
        least[gap.out_after + 1 : gap.back_before] -= gap.size_bytes
    return least


def timetable(
    seconds: Sequence[Seconds], resident_bytes: Numbers, gaps: Sequence[Gap], link: Link, limit_bytes: Bytes
) -> Timetable:
    """Return when arrays are copied.

    Args:
        seconds: of each timestep.
        resident_bytes: of each timestep if nothing is away.
        gaps: what shall be away.
        link: which copies.
        limit_bytes: what is never passed, unless no timetable of these gaps could do without: then it is
            the least that one needs.
    """
    gaps = sorted(gaps, key=lambda gap: (gap.back_before, gap.array, gap.out_after))
    limit_bytes = max(limit_bytes, int(least_bytes(resident_bytes, gaps).max(initial=0)))
    transfers = _leave(seconds, resident_bytes, gaps, link, limit_bytes)
    return _return(seconds, resident_bytes, transfers, gaps, link, limit_bytes)


def _leave(
    seconds: Sequence[Seconds], resident_bytes: Numbers, gaps: Sequence[Gap], link: Link, limit_bytes: Bytes
) -> list[Transfer]:
    """Return transfers that leave as they can, and come back without time at their access."""
    used = resident_bytes.copy()
    asked = _by_timestep([gap.out_after for gap in gaps])
    gone = [0] * len(gaps)
    pending: deque[tuple[Seconds, int]] = deque()
    now = free = 0.0
    for timestep, own in enumerate(seconds):
        while pending:
            end, first = pending[0]
            is_last_chance = any(gaps[index].back_before <= timestep + 1 for _, index in pending)
            if end > now and used[timestep] <= limit_bytes and not is_last_chance:
                break
            pending.popleft()
            now = max(now, end)
            gone[first] = timestep
            used[timestep : gaps[first].back_before] -= gaps[first].size_bytes
        now += own
        for index in asked.get(timestep, ()):
            free = max(now, free) + link.out_seconds(gaps[index].size_bytes)
            pending.append((free, index))
    return [
        Transfer(gap.out_after, gone[index], gap.back_before, gap.back_before, gap.array)
        for index, gap in enumerate(gaps)
    ]


def _return(
    seconds: Sequence[Seconds],
    resident_bytes: Numbers,
    transfers: Sequence[Transfer],
    gaps: Sequence[Gap],
    link: Link,
    limit_bytes: Bytes,
) -> Timetable:
    """Ask for copies in as early as they may be; the clocks are those of the simulator."""
    used = resident_bytes.copy()
    for transfer, gap in zip(transfers, gaps, strict=True):
        used[transfer.gone_before : gap.back_before] -= gap.size_bytes
    asked_out = _by_timestep([transfer.out_after for transfer in transfers])
    waited_out = _by_timestep([transfer.gone_before for transfer in transfers])
    out_ends, in_ends, back = [0.0] * len(gaps), [0.0] * len(gaps), [gap.back_before for gap in gaps]
    begins = []
    now = out_free = in_free = 0.0
    following = awaited = 0
    for timestep, own in enumerate(seconds):
        for index in waited_out.get(timestep, ()):
            now = max(now, out_ends[index])
        while following < len(gaps):
            gap = gaps[following]
            if gap.back_before > timestep and (
                transfers[following].gone_before >= timestep
                or in_free > now + own
                or used[timestep : gap.back_before].max() + gap.size_bytes > limit_bytes
            ):
                break
            back[following] = timestep
            used[timestep : gap.back_before] += gap.size_bytes
            in_free = max(now, in_free) + link.in_seconds(gap.size_bytes)
            in_ends[following] = in_free
            following += 1
        while awaited < len(gaps) and gaps[awaited].back_before == timestep:
            now = max(now, in_ends[awaited])
            awaited += 1
        begins.append(now)
        now += own
        for index in asked_out.get(timestep, ()):
            out_free = max(now, out_free) + link.out_seconds(gaps[index].size_bytes)
            out_ends[index] = out_free
    returning = [replace(transfer, back_from=at) for transfer, at in zip(transfers, back, strict=True)]
    return Timetable(tuple(returning), (*begins, now), tuple(out_ends))


def _by_timestep(timesteps: Sequence[Timestep]) -> dict[Timestep, list[int]]:
    named: dict[Timestep, list[int]] = {}
    for index, timestep in enumerate(timesteps):
        named.setdefault(timestep, []).append(index)
    return named
