"""When chosen arrays are copied out and in: so that nothing stalls, or within a budget whatever that stalls.

Each array is copied out right after its last access. Its copy in begins as late as it can without a stall:
from the last deadline to the first, each copy ends at its own, or where the next one begins. That is the
fewest bytes at every moment, and the sequence of deadlines, in which a link that copies one after the other
misses none if any sequence misses none. What waits from one step to the next keeps the link busy across the
step's end: two steps are looked at then, since a link that has the time for a step's copies is as far behind
at the end of each step as at the end of the first. For a budget, the timesteps are walked with both
directions' clocks; where bytes pass the budget, the operators wait for what is cheapest to wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.gaps import Gap, is_across, part_of, remove
from olla_solvers.swapping.simulate import Simulation, simulate_settled
from olla_solvers.swapping.timeline import Timeline
from olla_solvers.swapping.transfers import Link, Transfer, away_bytes

SLACK = 1e-9
"""Share of the step's seconds by which copies end before they are waited for, against rounding."""


Timesteps: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

Moments: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True)
class Swapped:
    """A timeline with transfers.

    Attributes:
        transfers: of copies that begin at the same boundary, the first comes first.
        resident_bytes: of each timestep.
        simulation: its times.
    """

    transfers: tuple[Transfer, ...]
    resident_bytes: tuple[Bytes, ...]
    simulation: Simulation

    @property
    def peak_bytes(self) -> Bytes:
        """Most bytes alive at once."""
        return max(self.resident_bytes, default=0)

    @property
    def seconds(self) -> Seconds:
        """Of the step with repetitions and stalls."""
        return self.simulation.seconds


def swapped(timeline: Timeline, transfers: Sequence[Transfer], sizes: Sequence[Bytes], link: Link) -> Swapped:
    """Return a timeline with transfers.

    Args:
        timeline: without.
        transfers: in gaps of it.
        sizes: of each transfer's array.
        link: which copies.
    """
    away = away_bytes(transfers, sizes, len(timeline.seconds))
    resident = tuple(there - gone for there, gone in zip(timeline.resident_bytes, away, strict=True))
    return Swapped(tuple(transfers), resident, simulate_settled(timeline.seconds, transfers, sizes, link))


class Places:
    """Where arrays are if they are swapped without a stall, of any of some gaps."""

    def __init__(self, timeline: Timeline, gaps: Sequence[Gap], link: Link) -> None:
        """Note times and durations of all copies.

        Args:
            timeline: of the gaps.
            gaps: that could be swapped.
            link: which copies.
        """
        self._length = len(timeline.seconds)
        self._step_seconds = timeline.begins[-1]
        self._slack = SLACK * self._step_seconds
        self._steps = 2 if is_across(gaps, self._length) else 1
        self._begins = np.array(timeline.begins)
        self._out_after = np.array([gap.out_after for gap in gaps], dtype=np.int64)
        self._back_before = np.array([gap.back_before for gap in gaps], dtype=np.int64)
        self._out_seconds = np.array([link.out_seconds(gap.size_bytes) for gap in gaps])
        self._in_seconds = np.array([link.in_seconds(gap.size_bytes) for gap in gaps])

    def are_carried(self, chosen: Sequence[int]) -> bool:
        """Return True if the link copies some gaps' arrays in the time of a step.

        Args:
            chosen: places of these gaps.
        """
        most = max(self._out_seconds[chosen].sum(), self._in_seconds[chosen].sum())
        return bool(most <= self._step_seconds + self._slack)

    def of(self, chosen: Sequence[int]) -> tuple[Timesteps, Timesteps]:
        """Return from which and to which timestep arrays are away, if some gaps are swapped and no others.

        Args:
            chosen: places of these gaps.

        Returns:
            Of each the two ends of ``[gone, back)``; there are no timesteps where a copy would not end in
            time.
        """
        indices = np.array(chosen, dtype=np.int64)
        begins, step_seconds = self._begins, self._step_seconds
        if self._steps > 1:
            # Steps in which the link is behind take longer.
            copies = self._out_seconds[indices].sum(), self._in_seconds[indices].sum()
            step_seconds = max(step_seconds, *copies)
            begins = np.concatenate([begins[:-1] + step * step_seconds for step in range(4)])
        back = self._back(indices, begins, step_seconds)
        return self._gone(indices, back, begins, step_seconds), back

    def _gone(self, indices: Timesteps, back: Timesteps, begins: Moments, step_seconds: Seconds) -> Timesteps:
        """Return when copies out end: each begins when its array is there, and the one before has ended."""
        keys = _needed(self._back_before[indices], back, self._length), self._out_after[indices]
        order = np.lexsort(keys)
        sequence = indices[order]
        seconds = np.tile(self._out_seconds[sequence], self._steps)
        copied = np.cumsum(seconds)
        there = begins[self._out_after[sequence] + 1]
        there = np.concatenate([there + step * step_seconds for step in range(self._steps)])
        ends = copied + np.maximum.accumulate(there - (copied - seconds))
        ends = ends[len(ends) - len(indices) :] - (self._steps - 1) * step_seconds
        gone = np.empty_like(indices)
        gone[order] = np.searchsorted(begins, ends + self._slack, side="left")
        return np.maximum(gone, self._out_after[indices] + 1)

    def _back(self, indices: Timesteps, begins: Moments, step_seconds: Seconds) -> Timesteps:
        """Return when copies in begin: each ends when it is needed, or when the next one begins."""
        needed = self._back_before[indices] % self._length if self._steps > 1 else self._back_before[indices]
        order = np.argsort(-needed, kind="stable")
        sequence = indices[order]
        seconds = np.tile(self._in_seconds[sequence], self._steps)
        copied = np.cumsum(seconds)
        ends = np.concatenate([begins[needed[order]] - step * step_seconds for step in range(self._steps)])
        starts = np.minimum.accumulate(ends + (copied - seconds)) - copied
        # Of the step in which it is needed, counted from the one in which it was there before.
        later = (self._back_before[sequence] - needed[order]) // self._length + (self._steps - 1)
        starts = starts[len(starts) - len(indices) :] + later * step_seconds
        back = np.empty_like(indices)
        back[order] = np.searchsorted(begins, starts - self._slack, side="right") - 1
        return np.clip(back, 0, self._back_before[indices])


def places(timeline: Timeline, gaps: Sequence[Gap], link: Link) -> list[tuple[Timestep, Timestep]]:
    """Return for each gap from which to which timestep its array is away if all are swapped without a stall.

    Args:
        timeline: of the gaps.
        gaps: any.
        link: which copies.

    Returns:
        Timesteps ``[gone, back)``; there are none of them where a copy would not end in time.
    """
    gone, back = Places(timeline, gaps, link).of(range(len(gaps)))
    return list(zip(gone.tolist(), back.tolist(), strict=True))


def transfers_of(
    gaps: Sequence[Gap], away: Sequence[tuple[Timestep, Timestep]], length: int
) -> list[tuple[Transfer, Gap]]:
    """Return the transfers of gaps, those first that are needed again first in the step that copies them in.

    Args:
        gaps: what is swapped.
        away: for each the timesteps at which it is; no transfer if there are none.
        length: of the step.
    """
    pairs = [
        (Transfer(gap.out_after, gone, back, gap.back_before, gap.array), gap)
        for gap, (gone, back) in zip(gaps, away, strict=True)
        if gone < back
    ]
    return sorted(pairs, key=lambda pair: (_needed(pair[1].back_before, pair[0].back_from, length), pair[0]))


def _needed(back_before: Any, back_from: Any, length: int) -> Any:
    """Return when arrays are needed, counted from the step in which they are copied in."""
    return back_before - back_from // length * length


def without_stalls(timeline: Timeline, gaps: Sequence[Gap], link: Link) -> Swapped:
    """Return the timeline with some arrays away for as long as nothing stalls.

    Args:
        timeline: of the gaps.
        gaps: what is swapped, where there is time.
        link: which copies.
    """
    pairs = transfers_of(gaps, places(timeline, gaps, link), len(timeline.seconds))
    return swapped(timeline, [transfer for transfer, _ in pairs], [gap.size_bytes for _, gap in pairs], link)


def within_budget(
    timeline: Timeline,
    gaps: Sequence[Gap],
    link: Link,
    budget_bytes: Bytes,
    most_seconds: Seconds = math.inf,
) -> Swapped | None:
    """Return the timeline with some arrays away, where needed for a budget with stalls.

    Args:
        timeline: of the gaps.
        gaps: what may be swapped.
        link: which copies.
        budget_bytes: the peak that is wanted; it may be passed, if nothing more can be away.
        most_seconds: that it may take.

    Returns:
        None if it would take more seconds.
    """
    away = _Waits(timeline, gaps, link, budget_bytes, most_seconds).away()
    if away is None:
        return None
    pairs = transfers_of(gaps, away, len(timeline.seconds))
    return swapped(timeline, [transfer for transfer, _ in pairs], [gap.size_bytes for _, gap in pairs], link)


def without_needless(timeline: Timeline, done: Swapped, link: Link, budget_bytes: Bytes) -> Swapped:
    """Return the timeline without transfers that a budget does not need; the largest arrays stay.

    Args:
        timeline: without transfers.
        done: with them.
        link: which copies.
        budget_bytes: the peak that may not be passed, unless it is already.
    """
    most = max(budget_bytes, done.peak_bytes)
    size_of = {gap.array: gap.size_bytes for gap in timeline.gaps}
    resident = np.array(done.resident_bytes, dtype=np.int64)
    needless = set()
    for transfer in sorted(done.transfers, key=lambda transfer: (size_of[transfer.array], transfer)):
        size_bytes, (gone, back) = size_of[transfer.array], (transfer.gone_before, transfer.back_from)
        if int(part_of(resident, gone, back).max()) + size_bytes <= most:
            remove(resident, gone, back, -size_bytes)
            needless.add(transfer)
    left = [transfer for transfer in done.transfers if transfer not in needless]
    return swapped(timeline, left, [size_of[transfer.array] for transfer in left], link)


class _Waits:
    """Walks the timesteps, and waits where bytes pass the budget."""

    def __init__(
        self,
        timeline: Timeline,
        gaps: Sequence[Gap],
        link: Link,
        budget_bytes: Bytes,
        most_seconds: Seconds,
    ) -> None:
        self._timeline = timeline
        self._gaps = gaps
        self._link = link
        self._budget_bytes = budget_bytes
        self._away = places(timeline, gaps, link)
        self._resident = np.array(timeline.resident_bytes, dtype=np.int64)
        for index in range(len(gaps)):
            self._count(index, -1)
        self._most_seconds = most_seconds
        self._length = len(timeline.seconds)
        self._across = [index for index, gap in enumerate(gaps) if gap.back_before >= self._length]
        self._out_end = [0.0] * len(gaps)
        self._clock = 0.0

    def away(self) -> list[tuple[Timestep, Timestep]] | None:
        """Return for each gap when its array is away; None if that takes too long."""
        length = self._length
        ends: dict[Timestep, list[int]] = {}
        needs: dict[Timestep, list[int]] = {}
        for index, gap in enumerate(self._gaps):
            ends.setdefault(gap.out_after, []).append(index)
            needs.setdefault(gap.back_before % length, []).append(index)
        open_gaps: dict[int, Timestep] = {}
        out_free, in_free = 0.0, -math.inf
        for index in self._across:
            # As the step before has left it.
            open_gaps[index] = length
            self._out_end[index] = self._seconds(length, self._away[index][0])
            out_free = max(out_free, self._out_end[index])
        for timestep, seconds in enumerate(self._timeline.seconds):
            for index in sorted(needs.get(timestep, ()), key=lambda index: self._away[index][1]):
                past = open_gaps.pop(index)
                gone, back = self._away[index]
                if gone < back:
                    began = self._clock - self._seconds(back - past, timestep)
                    in_free = max(in_free, began) + self._link.in_seconds(self._gaps[index].size_bytes)
                    self._clock = max(self._clock, in_free)
            while self._resident[timestep] > self._budget_bytes:
                if not self._wait(timestep, open_gaps):
                    break
            if self._clock + self._timeline.begins[-1] - self._timeline.begins[timestep] > self._most_seconds:
                return None
            self._clock += seconds
            for index in ends.get(timestep, ()):
                open_gaps[index] = 0
                out_free = max(out_free, self._clock) + self._link.out_seconds(self._gaps[index].size_bytes)
                self._out_end[index] = out_free
        return self._away

    def _wait(self, timestep: Timestep, open_gaps: dict[int, Timestep]) -> bool:
        """Have one more array away at a timestep, the one that stalls least for its bytes."""
        excess = int(self._resident[timestep]) - self._budget_bytes
        best, best_rate = None, 0.0
        for index, past in open_gaps.items():
            gone, back = self._away[index]
            moment = timestep + past
            if gone <= moment < back:
                continue
            gap = self._gaps[index]
            stall = max(0.0, self._out_end[index] - self._clock) if gone > moment or gone >= back else 0.0
            if back <= moment:
                left = self._seconds(moment + 1, gap.back_before)
                stall += max(0.0, self._link.in_seconds(gap.size_bytes) - left)
            rate = stall / min(excess, gap.size_bytes)
            if best is None or rate < best_rate:
                best, best_rate = index, rate
        if best is None:
            return False
        moment = timestep + open_gaps[best]
        gone, back = self._away[best]
        self._count(best, 1)
        if gone >= back:
            gone = back = moment
        self._away[best] = min(gone, moment), max(back, self._returns(best, moment))
        self._count(best, -1)
        self._clock = max(self._clock, self._out_end[best])
        return True

    def _returns(self, index: int, moment: Timestep) -> Timestep:
        """Return the first timestep after another one at which there is room, or the array is needed."""
        end = self._gaps[index].back_before
        has_room = part_of(self._resident, moment + 1, end) <= self._budget_bytes
        return moment + 1 + int(np.argmax(has_room)) if has_room.any() else end

    def _seconds(self, first: Timestep, end: Timestep) -> Seconds:
        """Return the seconds from one timestep to another, of the steps before and after, too."""
        return self._begin(end) - self._begin(first)

    def _begin(self, timestep: Timestep) -> Seconds:
        steps, timestep = divmod(timestep, self._length)
        return steps * self._timeline.begins[-1] + self._timeline.begins[timestep]

    def _count(self, index: int, sign: int) -> None:
        gone, back = self._away[index]
        if gone < back:
            remove(self._resident, gone, back, -sign * self._gaps[index].size_bytes)
