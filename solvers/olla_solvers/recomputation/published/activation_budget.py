"""Minimum cut and knapsack, in the manner of ``torch.compile``'s ``activation_memory_budget``.

What backward may read is a cut of forward's graph: the arrays on it are saved, and everything behind it is
made again from them. Some units are banned from being made again. With a budget of 1 those are all that take
long, and what an operator of backward that takes long reads. With less, only those that take long; if the cut
is still above the budget, a knapsack decides which of these stay banned: the ones whose repetition would take
longest within the bytes of the budget. Then the cut is taken a last time.

The budget is a share between saving nothing and the cut of budget 1. It speaks of saved bytes, not of the
peak. So for a budget in bytes many shares are tried, and the fastest plan that really fits is returned.

Its rules speak of kinds of operators: a list of operators that are cheap enough, one of those that take long,
and which kernels would be fused. Here operators have a time only, so those that *take long* are given by the
caller, or found by :func:`long_operators`; all others count as cheap and fusible. Its limits on chains of
fused kernels, and the double weight of what would be fused, are left out, since this problem has no fused
kernels; on ResNet-50, VGG-16 and ViT-B/16 the weight changed nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from olla_solvers.graph.minimum_cut import ENDLESS, SINK, SOURCE, Network
from olla_solvers.problem import ArrayKind, Bytes, OperatorIndex
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.problem import ArrayIndex, Recomputation, RecomputationProblem
from olla_solvers.recomputation.published.knapsack import Knapsack, chosen
from olla_solvers.recomputation.published.mirror import MirrorCounts, best_mirrored
from olla_solvers.recomputation.published.segments import unit_bytes
from olla_solvers.recomputation.units import Unit

SHARES = 40
"""Budgets that are tried, evenly spread from 0 to 1."""

TIMES_MEDIAN = 2.0
"""An operator takes long from this multiple of the median seconds per byte on."""

REDUCTION = 4
"""A unit that is so many times smaller than what it reads is always saved."""

FARTHER = 1.1
"""An array weighs so many times more for each step that it is farther from backward, up to 100 steps."""

FARTHEST = 100


def dynamic_budget(
    problem: RecomputationProblem, budget_bytes: Bytes, *, long: Collection[OperatorIndex] | None = None
) -> Recomputation:
    """Plan with the knapsack solved by dynamic programming.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
        long: the operators that take long; None to find them.
    """
    return _plan(problem, budget_bytes, "dynamic", long)


def greedy_budget(
    problem: RecomputationProblem, budget_bytes: Bytes, *, long: Collection[OperatorIndex] | None = None
) -> Recomputation:
    """Plan with the knapsack solved greedily.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
        long: the operators that take long; None to find them.
    """
    return _plan(problem, budget_bytes, "greedy", long)


def _plan(
    problem: RecomputationProblem,
    budget_bytes: Bytes,
    knapsack: Knapsack,
    long: Collection[OperatorIndex] | None,
) -> Recomputation:
    instance = prepare(problem)
    cuts = ActivationCuts(instance, frozenset(long_operators(instance) if long is None else long))
    return best_mirrored(instance, budget_bytes, _all_counts(cuts, knapsack))


def _all_counts(cuts: ActivationCuts, knapsack: Knapsack) -> Iterator[MirrorCounts]:
    last = None
    for step in range(SHARES, -1, -1):
        counts = cuts.counts(step / SHARES, knapsack)
        if counts != last:
            yield counts
        last = counts


def long_operators(instance: Instance) -> Iterator[OperatorIndex]:
    """Yield the operators that take more than the median time, and much more than it per byte.

    Args:
        instance: the step.
    """
    problem = instance.problem
    touched = [0] * len(problem.seconds)
    for array in problem.problem.arrays:
        for operator in (*array.consumers, *(() if array.producer is None else (array.producer,))):
            touched[operator] += array.size_bytes
    operators = [operator for operator, size in enumerate(touched) if size and problem.seconds[operator] > 0]
    rate = {operator: problem.seconds[operator] / touched[operator] for operator in operators}
    usual = median(rate.values()) if rate else 0.0
    usual_seconds = median(problem.seconds[operator] for operator in operators) if operators else 0.0
    for operator in operators:
        if rate[operator] > TIMES_MEDIAN * usual and problem.seconds[operator] > usual_seconds:
            yield operator


@dataclass(frozen=True)
class ActivationCuts:
    """Cuts of one step.

    Attributes:
        instance: the step.
        long: the operators that take long.
    """

    instance: Instance
    long: frozenset[OperatorIndex]

    def counts(self, share: float, knapsack: Knapsack) -> MirrorCounts:
        """Return mirror counts for a budget: 0 for what is saved, 1 for all else.

        Args:
            share: the budget, from 0 to 1.
            knapsack: how units are chosen that take long and are saved.
        """
        if share >= 1 or not self._most_bytes:
            return self._counts_of(self._saved_at_most)
        if share <= 0:
            return [1] * len(self.instance.units.arrays)
        saved = self._saved(self._banned)
        if self._bytes(saved) < share * self._most_bytes:
            return self._counts_of(saved)
        items = sorted(self._banned & self._needed, key=lambda unit: (-unit_bytes(self.instance, unit), unit))
        weights = [unit_bytes(self.instance, unit) / self._most_bytes for unit in items]
        values = [self.instance.units.seconds[unit] for unit in items]
        kept = {items[item] for item in chosen(values, weights, share, knapsack)}
        return self._counts_of(self._saved(kept | (self._banned - set(items))))

    @cached_property
    def _banned(self) -> frozenset[Unit]:
        """Units that take long, and those far smaller than what they read."""
        instance = self.instance
        banned = set()
        for unit, operators in enumerate(instance.units.operators):
            own = set(instance.units.arrays[unit])
            read = {array for operator in operators for array in instance.reads[operator]} - own
            size = sum(instance.problem.problem.arrays[array].size_bytes for array in read)
            if not self.long.isdisjoint(operators) or REDUCTION * unit_bytes(instance, unit) < size:
                banned.add(unit)
        return frozenset(banned)

    @cached_property
    def _saved_at_most(self) -> frozenset[Unit]:
        """What is saved with a budget of 1: no operator that takes long reads anything made again."""
        instance = self.instance
        read = {
            instance.units.of_array[array] for operator in self.long for array in instance.demands[operator]
        }
        return self._saved(self._banned | read)

    @cached_property
    def _most_bytes(self) -> Bytes:
        return self._bytes(self._saved_at_most)

    @cached_property
    def _distance(self) -> dict[Unit, int]:
        """Steps from each unit to a later phase; without those that none needs anything of."""
        instance = self.instance
        nearest: dict[Unit, int] = {}
        todo = []
        for unit in sorted({instance.units.of_array[array] for read in instance.demands for array in read}):
            nearest[unit] = 1
            todo.append(unit)
        for unit in todo:
            for read in instance.units.reads[unit]:
                if read not in nearest:
                    nearest[read] = nearest[unit] + 1
                    todo.append(read)
        return nearest

    @property
    def _needed(self) -> frozenset[Unit]:
        return frozenset(self._distance)

    def _bytes(self, units: Collection[Unit]) -> Bytes:
        return sum(unit_bytes(self.instance, unit) for unit in units)

    def _counts_of(self, saved: Collection[Unit]) -> MirrorCounts:
        return [int(unit not in saved) for unit in range(len(self.instance.units.arrays))]

    def _saved(self, banned: Collection[Unit]) -> frozenset[Unit]:
        """Return the units on the least cut such that no banned one lies behind it."""
        instance, distance = self.instance, self._distance
        network = Network(float("inf"))
        inward = {unit: network.node() for unit in distance}
        outward = {unit: network.node() for unit in distance}
        for unit, steps in distance.items():
            weight = unit_bytes(instance, unit) * FARTHER ** min(steps, FARTHEST)
            network.edge(inward[unit], outward[unit], int(weight))
            if unit in banned:
                network.edge(SOURCE, inward[unit], ENDLESS)
            if steps == 1:
                network.edge(outward[unit], SINK, ENDLESS)
            for read in instance.units.reads[unit]:
                network.edge(outward[read], inward[unit], ENDLESS)
        self._add_kept(network, inward)
        network.maximum_flow()
        behind = network.reaching_sink()
        return frozenset(unit for unit in distance if behind[outward[unit]] and not behind[inward[unit]])

    def _add_kept(self, network: Network, inward: dict[Unit, int]) -> None:
        """Add arrays that cannot be made again (masks of random draws): what reads them keeps them."""
        nodes: dict[ArrayIndex, int] = {}
        for unit, node in inward.items():
            for operator in self.instance.units.operators[unit]:
                for array in self.instance.reads[operator]:
                    if self.instance.units.of_array[array] < 0:
                        if array not in nodes:
                            nodes[array] = network.node()
                            network.edge(SOURCE, nodes[array], self._bytes_to_keep(array))
                        network.edge(nodes[array], node, ENDLESS)

    def _bytes_to_keep(self, index: ArrayIndex) -> Bytes:
        """Return what keeping an array costs; nothing if it is the caller's, or kept anyway."""
        array = self.instance.problem.problem.arrays[index]
        phases = self.instance.problem.phases
        is_read_later = array.producer is not None and any(
            phases[reader] > phases[array.producer] for reader in array.consumers
        )
        return 0 if is_read_later or array.kind is not ArrayKind.PLANNED else array.size_bytes
