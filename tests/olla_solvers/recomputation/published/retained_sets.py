"""The least seconds of repetitions within a budget, by trying everything."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

from olla_solvers.problem import ArrayKind
from olla_solvers.recomputation.instance import Instance

Alive = frozenset[int]
Costs = dict[Alive, float]


class RetainedSets:
    """States are sets of retained arrays; after an operator, what it made or read may be dropped."""

    def __init__(self, instance: Instance, budget: int) -> None:
        self.instance = instance
        self.problem = instance.problem
        self.arrays = instance.problem.problem.arrays
        self.budget = budget

    def after(self, operator: int, alive: Alive, repeated: bool) -> Iterable[Alive]:
        """What may be retained after a run."""
        reads = {a for a in self.instance.reads[operator] if self.arrays[a].kind is ArrayKind.PLANNED}
        if not reads <= alive:
            return
        makes = set(self.instance.makes[operator])
        lasting = {
            a
            for a in makes
            if self.arrays[a].kind is ArrayKind.PLANNED
            and (not repeated or self.instance.units.of_array[a] >= 0)
        }
        if lasting & alive:
            return
        total = sum(self.arrays[a].size_bytes for a in alive | lasting)
        total += sum(self.arrays[a].size_bytes for a in makes - lasting if repeated)
        total += self.problem.problem.operators[operator].workspace_bytes
        touched = sorted(reads | lasting)
        for size in range(len(touched) + 1):
            for dropped in itertools.combinations(touched, size):
                taken, free, open_ = 0, set(dropped) & reads, set(makes)
                for read, made in self.problem.takes_over:
                    if read in free and made in open_:
                        free.remove(read)
                        open_.remove(made)
                        taken += self.arrays[read].size_bytes
                if total - taken <= self.budget:
                    yield (alive | lasting) - set(dropped)

    def run(self, operators: Sequence[int], alive: Alive, repeated: bool) -> set[Alive]:
        states = {alive}
        for operator in operators:
            states = {after for state in states for after in self.after(operator, state, repeated)}
        return states

    def runnable(self, unit: int, position: int) -> bool:
        """True if a unit is complete, may still run, and forward has read it for the last time."""
        units = self.instance.units
        readers = {reader for a in units.arrays[unit] for reader in self.arrays[a].consumers}
        phases = self.problem.phases
        early = [
            at
            for at, operator in enumerate(self.problem.order)
            if operator in readers and phases[operator] == self.instance.phase_of(unit)
        ]
        return units.earliest[unit] <= position <= units.latest[unit] and position > max(early, default=-1)

    def in_slots(self, slots: Sequence[tuple[int, int | None]]) -> float | None:
        """The answer with repetitions in given slots: (position, unit), or None for the operator itself."""
        costs: Costs = {frozenset(): 0.0}
        for position, unit in slots:
            after: Costs = {}
            for alive, cost in costs.items():
                if unit is None:
                    for state in self.run([self.problem.order[position]], alive, False):
                        after[state] = min(cost, after.get(state, cost))
                    continue
                after[alive] = min(cost, after.get(alive, cost))
                more = cost + self.instance.units.seconds[unit]
                for state in self.run(self.instance.units.operators[unit], alive, True):
                    after[state] = min(more, after.get(state, more))
            costs = after
        return min(costs.values(), default=None)

    def anywhere(self) -> float | None:
        """The answer with repetitions in any sequence before late operators."""
        costs: Costs = {frozenset(): 0.0}
        for position, operator in enumerate(self.problem.order):
            if self.problem.phases[operator]:
                costs = self._repeated(costs, position)
            after: Costs = {}
            for alive, cost in costs.items():
                for state in self.run([operator], alive, False):
                    after[state] = min(cost, after.get(state, cost))
            costs = after
        return min(costs.values(), default=None)

    def _repeated(self, costs: Costs, position: int) -> Costs:
        best = dict(costs)
        todo = [(cost, sorted(alive)) for alive, cost in costs.items()]
        heapq.heapify(todo)
        units = [u for u in range(len(self.instance.units.arrays)) if self.runnable(u, position)]
        while todo:
            cost, listed = heapq.heappop(todo)
            alive = frozenset(listed)
            if cost > best[alive]:
                continue
            for unit in units:
                more = cost + self.instance.units.seconds[unit]
                for state in self.run(self.instance.units.operators[unit], alive, True):
                    if more < best.get(state, float("inf")):
                        best[state] = more
                        heapq.heappush(todo, (more, sorted(state)))
        return best
