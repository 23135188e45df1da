"""Chen et al., Algorithm 3, memory planning with a budget, and the search over its budget B (appendix A).

Results are passed in topological order; one at which the bytes since the last split exceed B, and that is a
candidate, is kept and begins a new segment. All others are made again.

What the paper leaves open, and what was chosen:

* The candidates C are given. Here they are, in turn, the units through which all data passes
  (:func:`passages`; the output of a residual block) and all units. Where a graph has no passages, as an
  unrolled LSTM or a U-Net, only the second set splits it.
* The topological order is that of the step. The size of an output is the bytes of all arrays of a unit.
* The literal search (:func:`searched_counts`) runs B = 0, then B = sqrt(x y), then six values around it. It
  aims at the least memory. For a budget of the user's, :func:`all_segment_counts` tries a wide grid instead.
* The last segment is made again as well, although its results have just been computed: so says Algorithm 3.
* "We can also generalize this algorithm by considering the cost to run each operation": units whose seconds
  per byte are above a threshold are kept wherever they are; they count for no segment.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.low_cost import rates
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.low_cost import spread
from olla_solvers.recomputation.published.mirror import MirrorCounts, best_mirrored
from olla_solvers.recomputation.units import Unit

PAPER_GRID = 6
"""Values of B between its estimate divided by and times the root of 2."""

WIDE_GRID = 32
"""Values of B between the smallest unit and all of them together."""

THRESHOLDS = 6
"""Of seconds per byte, above which units are kept."""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """What Algorithm 3 returns.

    Attributes:
        counts: mirror counts m.
        kept_bytes: x, to store the results between segments.
        segment_bytes: y, the most within one segment.
    """

    counts: MirrorCounts
    kept_bytes: Bytes
    segment_bytes: Bytes


def plan_segments(
    instance: Instance, budget_bytes: float, candidates: Collection[Unit], kept: Collection[Unit] = ()
) -> SegmentPlan:
    """Run Algorithm 3.

    Args:
        instance: the step.
        budget_bytes: B, of one segment.
        candidates: C, where segments may end.
        kept: units that are kept in any case.
    """
    counts = [1] * len(instance.units.arrays)
    passed = kept_bytes = segment_bytes = 0
    for unit in in_order(instance):
        size = unit_bytes(instance, unit)
        if unit in kept:
            counts[unit] = 0
            kept_bytes += size
            continue
        passed += size
        if unit in candidates and passed > budget_bytes:
            kept_bytes += size
            segment_bytes = max(segment_bytes, passed)
            counts[unit] = passed = 0
    return SegmentPlan(counts, kept_bytes, segment_bytes)


def searched_counts(instance: Instance, candidates: Collection[Unit]) -> Iterator[MirrorCounts]:
    """Yield the plans of appendix A: B = 0, its estimate sqrt(x y), and the grid around that.

    Args:
        instance: the step.
        candidates: C.
    """
    first = plan_segments(instance, 0, candidates)
    yield first.counts
    estimate = math.sqrt(first.kept_bytes * first.segment_bytes)
    yield plan_segments(instance, estimate, candidates).counts
    for budget in _geometric(estimate / math.sqrt(2), estimate * math.sqrt(2), PAPER_GRID):
        yield plan_segments(instance, budget, candidates).counts


def all_segment_counts(
    instance: Instance, candidates: Collection[Unit], kept: Collection[Unit] = ()
) -> Iterator[MirrorCounts]:
    """Yield the plans of a wide grid of B.

    Args:
        instance: the step.
        candidates: C.
        kept: units that are kept in any case.
    """
    sizes = [size for unit in in_order(instance) if (size := unit_bytes(instance, unit))]
    last = None
    for budget in _geometric(min(sizes, default=1), sum(sizes), WIDE_GRID):
        counts = plan_segments(instance, budget, candidates, kept).counts
        if counts != last:
            yield counts
        last = counts


def sublinear(problem: RecomputationProblem, budget_bytes: Bytes) -> Recomputation:
    """Plan as appendix A does; of its plans the fastest within the budget, or the one of smallest peak.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
    """
    instance = prepare(problem)
    plans = (
        counts for candidates in candidate_sets(instance) for counts in searched_counts(instance, candidates)
    )
    return best_mirrored(instance, budget_bytes, plans)


def segments(problem: RecomputationProblem, budget_bytes: Bytes) -> Recomputation:
    """Plan by Algorithm 3 with a wide grid of B; the fastest within the budget, or the one of smallest peak.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
    """
    instance = prepare(problem)
    plans = (
        counts
        for candidates in candidate_sets(instance)
        for counts in all_segment_counts(instance, candidates)
    )
    return best_mirrored(instance, budget_bytes, plans)


def segments_by_cost(problem: RecomputationProblem, budget_bytes: Bytes) -> Recomputation:
    """Plan by Algorithm 3 with units kept that take long for their bytes, at several thresholds.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
    """
    instance = prepare(problem)
    rate = rates(instance)
    plans = (
        counts
        for threshold in spread(rate, THRESHOLDS)
        for kept in [{unit for unit, value in enumerate(rate) if value > threshold}]
        for candidates in candidate_sets(instance)
        for counts in all_segment_counts(instance, candidates, kept)
    )
    return best_mirrored(instance, budget_bytes, plans)


def candidate_sets(instance: Instance) -> tuple[Collection[Unit], ...]:
    """Return the sets of units at which segments may end: passages, and all."""
    every = frozenset(range(len(instance.units.arrays)))
    narrow = passages(instance)
    return (narrow, every) if narrow else (every,)


def passages(instance: Instance) -> frozenset[Unit]:
    """Return the units that everything later reads everything earlier through."""
    order = in_order(instance)
    place = {unit: index for index, unit in enumerate(order)}
    furthest = dict.fromkeys(order, -1)
    for unit in order:
        for read in instance.units.reads[unit]:
            furthest[read] = max(furthest[read], place[unit])
    ends, reach = [], -1
    for index, unit in enumerate(order):
        if reach <= index:
            ends.append(unit)
        reach = max(reach, furthest[unit])
    return frozenset(ends)


def in_order(instance: Instance) -> Sequence[Unit]:
    """Return the units in the sequence in which forward makes them."""
    return sorted(range(len(instance.units.arrays)), key=lambda unit: (instance.units.earliest[unit], unit))


def unit_bytes(instance: Instance, unit: Unit) -> Bytes:
    """Return the bytes of a unit's arrays."""
    return sum(instance.flat.array_bytes[array] for array in instance.units.arrays[unit])


def _geometric(first: float, last: float, count: int) -> list[float]:
    """Return numbers from the first to the last, each a fixed multiple of the one before."""
    if first <= 0:
        return [last]
    ratio = (last / first) ** (1 / (count - 1))
    return [first * ratio**index for index in range(count)]
