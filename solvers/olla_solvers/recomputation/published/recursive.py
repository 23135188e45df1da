"""Chen et al., §4.4: keeps k results, and plans each part between them in the same way, recursively.

``g(n) = k + g(n / (k + 1))`` bytes; for a chain and k = 1 that is ``log2 n`` results at a time. In the mirror
counts of Algorithm 2, what is kept at the first level has m = 0, at the second m = 1, and so on: a unit of
level d runs again for each level above it, and everything runs at most as often as there are levels.

What the paper leaves open, and what was chosen: the k results are those that divide the bytes of the part
most evenly, among the candidates of :mod:`~olla_solvers.recomputation.published.segments`. The recursion ends
where a part has no candidate, or at a given depth. For a budget, several k and depths are tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from itertools import accumulate

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.mirror import MirrorCounts, best_mirrored
from olla_solvers.recomputation.published.segments import candidate_sets, in_order, unit_bytes
from olla_solvers.recomputation.units import Unit

RESULTS_KEPT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Values of k that are tried for a budget."""

MOST_RUNS_AGAIN = 8
"""The deepest recursion that is tried: a step that runs forward more often than this is of little use."""


def recursive(problem: RecomputationProblem, budget_bytes: Bytes) -> Recomputation:
    """Plan recursively; the fastest plan within the budget, or the one of smallest peak.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
    """
    instance = prepare(problem)
    return best_mirrored(instance, budget_bytes, _all_counts(instance))


def recursive_counts(
    instance: Instance, kept: int, candidates: Collection[Unit], depth: int | None = None
) -> MirrorCounts:
    """Return the mirror counts of the recursive plan.

    Args:
        instance: the step.
        kept: k, the results kept in each part.
        candidates: units that may be kept.
        depth: of the recursion, at most; None for no limit.
    """
    order = in_order(instance)
    ends = list(accumulate((unit_bytes(instance, unit) for unit in order), initial=0))
    counts = [0] * len(order)
    parts = [(0, len(order), 0)]
    for first, last, level in parts:
        splits = []
        if depth is None or level < depth:
            choice = [index for index in range(first, last) if order[index] in candidates]
            splits = _evenly(choice, ends, ends[first], ends[last], kept)
        if not splits:
            for index in range(first, last):
                counts[order[index]] = level
            continue
        for index in splits:
            counts[order[index]] = level
        begins = [first, *(index + 1 for index in splits)]
        parts += [
            (begin, end, level + 1) for begin, end in zip(begins, [*splits, last], strict=True) if begin < end
        ]
    return counts


def _evenly(choice: list[int], ends: list[Bytes], first: Bytes, last: Bytes, kept: int) -> list[int]:
    """Return the places, at most so many, that divide the bytes between two others most evenly."""
    places = []
    for part in range(1, kept + 1):
        middle = first + (last - first) * part / (kept + 1)
        at = bisect_left(choice, middle, key=lambda index: ends[index + 1])
        nearest = min(
            choice[max(0, at - 1) : at + 1], key=lambda index: abs(ends[index + 1] - middle), default=None
        )
        if nearest is not None and nearest not in places:
            places.append(nearest)
    return sorted(places)


def _all_counts(instance: Instance) -> Iterator[MirrorCounts]:
    for candidates in candidate_sets(instance):
        for kept in RESULTS_KEPT:
            last = None
            for depth in range(1, MOST_RUNS_AGAIN + 1):
                counts = recursive_counts(instance, kept, candidates, depth)
                if counts == last:
                    break
                yield counts
                last = counts
