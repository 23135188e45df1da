"""Chen et al., §4.2: drops the results of operations of low cost, keeps those that take long.

The paper names the operations (batch normalisation, activations, pooling). Here cost is seconds per byte: a
unit is dropped if making it again takes no longer per byte freed than a threshold. A set of operators of low
cost can be given instead, which is the paper's rule to the letter; otherwise, for a budget, thresholds are
tried from the cheapest unit on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.low_cost import rates
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.mirror import MirrorCounts, best_mirrored

MOST_THRESHOLDS = 64
"""Thresholds that are tried, at most."""


def low_cost(
    problem: RecomputationProblem, budget_bytes: Bytes, *, operators: Collection[OperatorIndex] | None = None
) -> Recomputation:
    """Drop cheap results; the fastest plan within the budget, or the one of smallest peak.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
        operators: those of low cost; None to choose them by thresholds of seconds per byte.
    """
    instance = prepare(problem)
    if operators is not None:
        cheap = frozenset(operators)
        only = [int(cheap.issuperset(members)) for members in instance.units.operators]
        return best_mirrored(instance, budget_bytes, [only])
    return best_mirrored(instance, budget_bytes, low_cost_counts(instance))


def low_cost_counts(instance: Instance) -> Iterator[MirrorCounts]:
    """Yield mirror counts for thresholds of seconds per byte, ascending."""
    rate = rates(instance)
    for threshold in spread(rate, MOST_THRESHOLDS):
        yield [int(value <= threshold) for value in rate]


def spread(values: Sequence[float], count: int) -> list[float]:
    """Return at most so many of some values, ascending: the largest, others evenly spread by rank."""
    distinct = sorted(set(values))
    if len(distinct) <= count:
        return distinct
    return [distinct[(index + 1) * len(distinct) // count - 1] for index in range(count)]
