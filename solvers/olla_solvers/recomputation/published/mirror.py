"""Chen et al., Algorithm 2: runs every unit as often as its mirror count says.

``m(v) = 0`` keeps a result. With ``m(v) = k`` there are copies 1 to k, and copy j reads of each predecessor
its newest copy up to the j-th; gradients read the last copy. Counts of 0 and 1 are the states of
:mod:`olla_solvers.recomputation.evaluate`; larger ones are the recursion of §4.4.

What the paper leaves open, and what was chosen:

* It constructs the gradient graph. Here that is given: the late operators, in the order of the problem.
* It appends "topological-order(ancestors(g[v])) - V'" before a gradient. Of the topological orders this is
  the one that goes depth first, so that each copy is made as late as possible.
* Any node may be mirrored. Here a unit can be made again only from the timestep at which it is complete until
  something that it reads is overwritten. A count that breaks this is lowered to 0.
* What cannot be made again (random draws) is no node of its graph; it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.evaluate import Evaluator
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import Execution, Recomputation
from olla_solvers.recomputation.published.sequence import measure, numbered, run_operator, run_unit
from olla_solvers.recomputation.units import Unit
from olla_solvers.recomputation.walk import KEPT, ONCE

MirrorCounts = Sequence[int]
"""For each unit how often it may run again."""


class _NotAllowedError(Exception):
    """A unit would have to run where it must not."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self.unit = unit


def mirrored(instance: Instance, counts: MirrorCounts) -> Recomputation:
    """Return the step with mirrored units.

    Args:
        instance: the step.
        counts: of each unit; those that cannot be followed are lowered to 0.
    """
    allowed = list(counts)
    while True:
        try:
            return measure(instance, _Mirror(instance, allowed).executions())
        except _NotAllowedError as error:
            allowed[error.unit] = 0


def best_mirrored(
    instance: Instance, budget_bytes: Bytes, candidates: Iterable[MirrorCounts]
) -> Recomputation:
    """Return the plan that takes the least extra time within a budget; none within it: the smallest peak.

    Args:
        instance: the step.
        budget_bytes: peak that is allowed.
        candidates: mirror counts to try; the step without repetitions is tried in any case.
    """
    evaluator = Evaluator(instance)
    best = mirrored(instance, [0] * len(instance.units.arrays))
    best_counts: MirrorCounts | None = None
    value = _value(best.peak_bytes, best.extra_seconds, budget_bytes)
    for counts in candidates:
        if max(counts, default=0) <= 1:
            evaluation = evaluator.evaluate([ONCE if count else KEPT for count in counts])
            if evaluation.is_valid:
                reached = _value(evaluation.peak_bytes, evaluation.extra_seconds, budget_bytes)
                if reached < value:
                    best_counts, value = list(counts), reached
                continue
        plan = mirrored(instance, counts)
        reached = _value(plan.peak_bytes, plan.extra_seconds, budget_bytes)
        if reached < value:
            best, best_counts, value = plan, None, reached
    return best if best_counts is None else mirrored(instance, best_counts)


def _value(peak_bytes: Bytes, extra_seconds: float, budget_bytes: Bytes) -> tuple[float, float, float]:
    """Return what is smaller for the better plan."""
    if peak_bytes <= budget_bytes:
        return (0, extra_seconds, peak_bytes)
    return (1, peak_bytes, extra_seconds)


class _Mirror:
    """Lays out the operators of a step and the copies of its units."""

    def __init__(self, instance: Instance, counts: MirrorCounts) -> None:
        self._instance = instance
        self._counts = counts
        self._made: set[tuple[Unit, int]] = set()
        self._executions: list[Execution] = []

    def executions(self) -> list[Execution]:
        """Return the sequence.

        Raises:
            _NotAllowedError: naming a unit that would have to run where it must not.
        """
        instance, counts = self._instance, self._counts
        for position, operator in enumerate(instance.problem.order):
            for array in instance.demands[operator]:
                unit = instance.units.of_array[array]
                if counts[unit]:
                    self._demand(unit, counts[unit], position)
            self._executions.append(run_operator(instance, operator, counts.__getitem__))
        return numbered(self._executions)

    def _demand(self, unit: Unit, copy: int, position: int) -> None:
        """Make a copy unless it is there, after the copies that it reads."""
        units, counts = self._instance.units, self._counts
        pending = [(unit, copy, iter(units.reads[unit]))] if (unit, copy) not in self._made else []
        while pending:
            top, number, wanted = pending[-1]
            other = next(wanted, None)
            if other is not None:
                needed = min(number, counts[other])
                if needed and (other, needed) not in self._made:
                    pending.append((other, needed, iter(units.reads[other])))
                continue
            pending.pop()
            if not units.earliest[top] <= position <= units.latest[top]:
                raise _NotAllowedError(top)
            self._made.add((top, number))
            newest = partial(_newest, counts, number)
            self._executions += run_unit(self._instance, top, number, newest)


def _newest(counts: MirrorCounts, most: int, unit: Unit) -> int:
    """Return the newest copy of a unit up to a number."""
    return min(most, counts[unit])
