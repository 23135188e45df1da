"""The least seconds of repetitions within a budget, over all orders and repetitions, by trying all of them.

Independent of the planner: a state is what has run and what is there; operators run first or again one at a
time, and anything may be dropped at any time. Of an array one version is there at a time, with the number of
its makers that have written to it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from olla_solvers.problem import ArrayKind
from tests.olla_solvers.recomputation.steps import Step

State = tuple[int, tuple[int, ...]]
"""A bitset of operators, and of each array how many makers have written to it; 0 if it is not there."""


class Exhaustive:
    """All sequences of one step."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.problem = step.problem.problem
        self.arrays = self.problem.arrays
        self.repeatable = {maker for makers in step.problem.makers for maker in makers}
        self.expected = self._expected()

    def _expected(self) -> list[dict[int, int]]:
        """For each operator the state in which it reads each array, in the given order."""
        stages = [0] * len(self.arrays)
        expected: list[dict[int, int]] = [{} for _ in self.step.kernels]
        for operator in self.step.problem.order:
            kernel = self.step.kernels[operator]
            expected[operator] = {array: stages[array] for array in kernel.reads}
            for array in (*kernel.makes, *kernel.writes):
                stages[array] += 1
        return expected

    def least_seconds(self, budget: int, orders: bool = True) -> float:
        """The least seconds within a budget; infinite if no sequence is within it.

        Args:
            budget: bytes.
            orders: whether operators may first run in any order.
        """
        everything = (1 << len(self.step.kernels)) - 1
        start: State = (0, tuple(0 for _ in self.arrays))
        best = {start: 0.0}
        heap: list[tuple[float, State]] = [(0.0, start)]
        while heap:
            seconds, state = heapq.heappop(heap)
            if seconds > best[state]:
                continue
            if state[0] == everything:
                return seconds
            for more, following in self._following(state, budget, orders):
                if seconds + more < best.get(following, math.inf):
                    best[following] = seconds + more
                    heapq.heappush(heap, (seconds + more, following))
        return math.inf

    def _following(self, state: State, budget: int, orders: bool) -> Iterator[tuple[float, State]]:
        executed, stages = state
        for array, stage in enumerate(stages):
            if stage and self.arrays[array].kind is ArrayKind.PLANNED:
                yield 0.0, (executed, (*stages[:array], 0, *stages[array + 1 :]))
        first = next((each for each in self.step.problem.order if not executed >> each & 1), None)
        for operator in range(len(self.step.kernels)):
            again = bool(executed >> operator & 1)
            if again and operator not in self.repeatable:
                continue
            if not again and not orders and operator != first:
                continue
            ready = all(executed >> each & 1 for each in self.problem.predecessors[operator])
            if ready and all(stages[array] == stage for array, stage in self.expected[operator].items()):
                for following in self._run(operator, again, state, budget):
                    yield self.step.problem.seconds[operator] if again else 0.0, following

    def _run(self, operator: int, again: bool, state: State, budget: int) -> Iterator[State]:
        executed, stages = state
        kernel = self.step.kernels[operator]
        sizes = [array.size_bytes for array in self.arrays]
        planned = [array.kind is ArrayKind.PLANNED for array in self.arrays]
        used = sum(size for size, stage, plan in zip(sizes, stages, planned, strict=True) if stage and plan)
        used += sum(sizes[array] for array in kernel.makes if planned[array] or again)
        used += self.problem.operators[operator].workspace_bytes
        following = list(stages)
        for array in kernel.makes:
            # Where a version is there, the new one is gone at once; so is one that may not be read.
            if not stages[array] and (not again or self.step.problem.makers[array]):
                following[array] = 1
        for array in kernel.writes:
            following[array] += 1
        for taken in self._takeovers(operator):
            if used - sum(sizes[read] for read in taken) <= budget:
                left = [0 if array in taken else stage for array, stage in enumerate(following)]
                yield executed | 1 << operator, tuple(left)

    def _takeovers(self, operator: int) -> Iterator[set[int]]:
        """All sets of arrays whose memory an operator's results may take over."""
        pairs = [
            (read, made)
            for read, made in self.step.problem.takes_over
            if made in self.step.kernels[operator].makes
        ]
        for count in range(len(pairs) + 1):
            for chosen in itertools.combinations(pairs, count):
                if len({read for read, _ in chosen}) == len({made for _, made in chosen}) == count:
                    yield {read for read, _ in chosen}
