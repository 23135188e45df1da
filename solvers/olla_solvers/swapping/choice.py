"""Chooses the arrays to swap in a sequence: most bytes that are beyond a budget for the link's time.

Greedy, as :mod:`olla_solvers.recomputation.greedy` is, and lazily: an array's rate is looked at again only
when it is the best so far. The link is a queue, so each choice is looked at together with all before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.problem import Bytes
from olla_solvers.swapping.gaps import Gap, is_across, part_of, remove
from olla_solvers.swapping.schedule import Places, Timesteps
from olla_solvers.swapping.timeline import Timeline
from olla_solvers.swapping.transfers import Link

MANY, BATCHES = 1000, 200
"""More gaps than this are chosen in so many batches: where many are alike, each is looked at again for each
that is chosen, with all that were chosen before."""

CLOSE = 0.9
"""Of many, a gap is chosen as soon as its rate is so close to what all others had at most."""

SMALL = 1e-4
"""Share of the peak below which an array is not worth a copy."""

_Profile: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_Heap: TypeAlias = list[tuple[float, int]]
"""Gaps by their rates, of the opposite sign, which are no smaller than what they are now."""


def choose(
    timeline: Timeline,
    gaps: Sequence[Gap],
    link: Link,
    budget_bytes: Bytes,
    worth: Callable[[Gap], float],
    *,
    may_stall: bool = False,
    first: Sequence[Gap] = (),
) -> list[Gap]:
    """Return the gaps of arrays to swap.

    Args:
        timeline: of the gaps.
        gaps: to choose from.
        link: which copies.
        budget_bytes: above which bytes count.
        worth: of a byte of a gap's array, relative to others.
        may_stall: True to go on with what has not the time, until the budget would be kept.
        first: those to begin with.
    """
    large = [gap for gap in gaps if gap.size_bytes >= SMALL * timeline.peak_bytes and gap not in first]
    chooser = _Chooser(timeline, (*first, *large), link, budget_bytes, worth)
    chosen = chooser.choose(range(len(first)), may_stall=may_stall)
    return [chooser.gaps[index] for index in chosen]


class _Chooser:
    """Chooses gaps by their places in the sequence of all that may be chosen."""

    def __init__(
        self,
        timeline: Timeline,
        gaps: Sequence[Gap],
        link: Link,
        budget_bytes: Bytes,
        worth: Callable[[Gap], float],
    ) -> None:
        self.gaps = gaps
        self._places = Places(timeline, gaps, link)
        self._is_across = is_across(gaps, len(timeline.seconds))
        self._sizes = np.array([gap.size_bytes for gap in gaps], dtype=np.int64)
        self._worth = [worth(gap) for gap in gaps]
        self._beyond = np.array(timeline.resident_bytes, dtype=np.int64) - budget_bytes

    def choose(self, first: Sequence[int], *, may_stall: bool) -> list[int]:
        """Return gaps, in the sequence in which they were chosen."""
        chosen = list(first)
        saved = {index: self._saved(index) for index in range(len(chosen), len(self.gaps))}
        heap = [(-rate, index) for index, rate in saved.items() if rate > 0]
        heapq.heapify(heap)
        late = [index for index, rate in saved.items() if rate <= 0]
        if len(heap) > MANY:
            self._choose_in_batches(chosen, heap, late)
        else:
            self._choose_one_by_one(chosen, heap, late)
        return self._stalling(chosen, late) if may_stall else chosen

    def _choose_one_by_one(self, chosen: list[int], heap: _Heap, late: list[int]) -> None:
        """Choose what lowers the bytes beyond the budget most, beside all that were chosen before."""
        left = _total(self._without(chosen, *self._places.of(chosen)))
        while heap and left > 0:
            _, index = heapq.heappop(heap)
            gone, back = self._places.of([*chosen, index])
            if (gone >= back).any() or not self._has_time([*chosen, index]):
                late.append(index)
                continue
            after = _total(self._without([*chosen, index], gone, back))
            rate = self._worth[index] * (left - after) / self.gaps[index].size_bytes
            if rate <= 0:
                late.append(index)
            elif heap and rate < -heap[0][0]:
                heapq.heappush(heap, (-rate, index))
            else:
                chosen.append(index)
                left = after

    def _choose_in_batches(self, chosen: list[int], heap: _Heap, late: list[int]) -> None:
        """Choose several at once, each as if what was chosen in earlier batches were all that is away."""
        size = len(heap) // BATCHES
        alone = {index: self._places.of([index]) for _, index in heap}
        beyond = self._without(chosen, *self._places.of(chosen))
        while heap and _total(beyond) > 0:
            batch: list[int] = []
            while heap and len(batch) < size:
                _, index = heapq.heappop(heap)
                (gone,), (back,) = alone[index]
                rate = self._rate(index, part_of(beyond, gone, back))
                if rate <= 0:
                    late.append(index)
                elif heap and rate < CLOSE * -heap[0][0]:
                    heapq.heappush(heap, (-rate, index))
                else:
                    batch.append(index)
            self._add(batch, chosen, late)
            beyond = self._without(chosen, *self._places.of(chosen))

    def _add(self, batch: list[int], chosen: list[int], late: list[int]) -> None:
        """Choose as many of a batch as all have the time for."""
        gone, back = self._places.of([*chosen, *batch])
        if (gone < back).all() and self._has_time([*chosen, *batch]):
            chosen += batch
        elif len(batch) == 1:
            late += batch
        else:
            middle = len(batch) // 2
            self._add(batch[:middle], chosen, late)
            self._add(batch[middle:], chosen, late)

    def _stalling(self, chosen: list[int], late: Sequence[int]) -> list[int]:
        """Go on with gaps in which a copy is waited for, as if their arrays were away all the time."""
        beyond = self._without(chosen, *self._places.of(chosen))
        heap = [(-self._lowered(index, self._between(index, beyond)), index) for index in late]
        heapq.heapify(heap)
        close = CLOSE if len(heap) > MANY else 1.0
        left = _total(beyond)
        while heap and left > 0:
            _, index = heapq.heappop(heap)
            rate = self._lowered(index, self._between(index, beyond))
            if rate <= 0:
                continue
            if heap and rate < close * -heap[0][0]:
                heapq.heappush(heap, (-rate, index))
                continue
            chosen.append(index)
            gap = self.gaps[index]
            left -= rate * gap.size_bytes
            remove(beyond, gap.out_after + 1, gap.back_before, gap.size_bytes)
        return chosen

    def _has_time(self, chosen: Sequence[int]) -> bool:
        """Return True if the link is not further behind after each step."""
        return not self._is_across or self._places.are_carried(chosen)

    def _between(self, index: int, beyond: _Profile) -> _Profile:
        """Return the part of a profile in which nothing accesses a gap's array."""
        gap = self.gaps[index]
        return part_of(beyond, gap.out_after + 1, gap.back_before)

    def _saved(self, index: int) -> float:
        """Return what swapping a gap's array alone is worth, for each of its bytes."""
        (gone,), (back,) = self._places.of([index])
        return self._rate(index, part_of(self._beyond, gone, back))

    def _rate(self, index: int, beyond: _Profile) -> float:
        """Return by how much the bytes beyond the budget fall if an array is away, for each of its bytes."""
        return self._worth[index] * self._lowered(index, beyond)

    def _lowered(self, index: int, beyond: _Profile) -> float:
        size = self.gaps[index].size_bytes
        return float(np.minimum(np.maximum(beyond, 0), size).sum()) / size

    def _without(self, chosen: Sequence[int], gone: Timesteps, back: Timesteps) -> _Profile:
        length = len(self._beyond)
        change = np.zeros((2 if self._is_across else 1) * length + 1, dtype=np.int64)
        is_away = gone < back
        sizes = self._sizes[np.array(chosen, dtype=np.int64)][is_away]
        np.subtract.at(change, gone[is_away], sizes)
        np.add.at(change, back[is_away], sizes)
        away: _Profile = np.cumsum(change[:-1]).reshape(-1, length).sum(axis=0)
        return self._beyond + away


def _total(beyond: _Profile) -> float:
    return float(np.maximum(beyond, 0).sum())
