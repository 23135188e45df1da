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
from olla_solvers.swapping.schedule import places
from olla_solvers.swapping.timeline import Gap, Timeline
from olla_solvers.swapping.transfers import Link

MOST_PLACED = 200_000
"""Gaps that are placed for one choice, counted anew with all before for each that is looked at."""

SMALL = 1e-4
"""Share of the peak below which an array is not worth a copy."""

_Profile: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


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
    return _Chooser(timeline, link, budget_bytes, worth).choose(gaps, first, may_stall=may_stall)


class _Chooser:
    def __init__(
        self, timeline: Timeline, link: Link, budget_bytes: Bytes, worth: Callable[[Gap], float]
    ) -> None:
        self._timeline = timeline
        self._link = link
        self._worth = worth
        self._beyond = np.array(timeline.resident_bytes, dtype=np.int64) - budget_bytes

    def choose(self, gaps: Sequence[Gap], first: Sequence[Gap], *, may_stall: bool) -> list[Gap]:
        """Return gaps, in the sequence in which they were chosen."""
        chosen = list(first)
        beyond = self._without(chosen, places(self._timeline, chosen, self._link))
        left = _total(beyond)
        late: list[Gap] = []
        heap = []
        for gap in gaps:
            if gap in first or gap.size_bytes < SMALL * self._timeline.peak_bytes:
                continue
            alone = places(self._timeline, [gap], self._link)[0]
            saved = self._saved(gap, *alone) if alone[0] < alone[1] else 0.0
            if saved > 0:
                heap.append((-saved, gap))
            else:
                late.append(gap)
        heapq.heapify(heap)
        placed = 0
        while heap and left > 0 and placed < MOST_PLACED:
            _, gap = heapq.heappop(heap)
            placed += len(chosen) + 1
            away = places(self._timeline, [*chosen, gap], self._link)
            if any(gone >= back for gone, back in away):
                late.append(gap)
                continue
            after = self._without([*chosen, gap], away)
            rate = self._worth(gap) * (left - _total(after)) / gap.size_bytes
            if rate <= 0:
                late.append(gap)
                continue
            if heap and rate < -heap[0][0]:
                heapq.heappush(heap, (-rate, gap))
                continue
            chosen.append(gap)
            beyond, left = after, _total(after)
        return self._stalling(chosen, late, beyond) if may_stall else chosen

    def _stalling(self, chosen: list[Gap], late: Sequence[Gap], beyond: _Profile) -> list[Gap]:
        """Go on with gaps in which a copy is waited for, as if their arrays were away all the time."""
        beyond = beyond.copy()
        heap = [(-self._rate(gap, beyond), gap) for gap in late]
        heapq.heapify(heap)
        while heap and _total(beyond) > 0:
            _, gap = heapq.heappop(heap)
            rate = self._rate(gap, beyond)
            if rate <= 0:
                continue
            if heap and rate < -heap[0][0]:
                heapq.heappush(heap, (-rate, gap))
                continue
            chosen.append(gap)
            beyond[gap.out_after + 1 : gap.back_before] -= gap.size_bytes
        return chosen

    def _rate(self, gap: Gap, beyond: _Profile) -> float:
        part = beyond[gap.out_after + 1 : gap.back_before]
        return float(np.minimum(np.maximum(part, 0), gap.size_bytes).sum()) / gap.size_bytes

    def _saved(self, gap: Gap, gone: int, back: int) -> float:
        """Return what swapping a gap's array alone is worth, for each of its bytes."""
        part = self._beyond[gone:back]
        saved = float(np.minimum(np.maximum(part, 0), gap.size_bytes).sum())
        return self._worth(gap) * saved / gap.size_bytes

    def _without(self, gaps: Sequence[Gap], away: Sequence[tuple[int, int]]) -> _Profile:
        beyond = self._beyond.copy()
        for gap, (gone, back) in zip(gaps, away, strict=True):
            beyond[gone:back] -= gap.size_bytes
        return beyond


def _total(beyond: _Profile) -> float:
    return float(np.maximum(beyond, 0).sum())
