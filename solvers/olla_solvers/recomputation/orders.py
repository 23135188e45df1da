"""An order of a step that suits repetitions, to begin from beside the one with the smallest peak.

An order of the smallest peak defers what makes little room, such as the gradients of weights or their norms,
and with it what they read. Where arrays are dropped after their last reader of their own phase and made again
for later ones, what is read early is gone early.
"""

from __future__ import annotations

import heapq

from olla_solvers.problem import ArrayKind, Bytes, OperatorIndex
from olla_solvers.recomputation.problem import ArrayIndex, RecomputationProblem


def early_order(problem: RecomputationProblem) -> tuple[OperatorIndex, ...]:
    """Return the captured order, in which operators come early that make no more than they free.

    An array is taken to be free after its last reader; one that can be made again, after that of its phase.

    Args:
        problem: the step; its own order does not matter.
    """
    return _Early(problem).order()


class _Early:
    """Runs operators in captured order, and those that free as much as they make at once."""

    def __init__(self, problem: RecomputationProblem) -> None:
        self._step = problem.problem
        self._place = {operator: place for place, operator in enumerate(self._step.captured_order)}
        self._missing = [len(before) for before in self._step.predecessors]
        self._readers: list[set[OperatorIndex]] = []
        self._read: list[list[ArrayIndex]] = [[] for _ in self._step.operators]
        self._freed: list[Bytes] = [0] * len(self._step.operators)
        for index, array in enumerate(self._step.arrays):
            readers: set[OperatorIndex] = set()
            if array.producer is not None and array.kind is ArrayKind.PLANNED:
                readers = set(array.consumers)
                phase = problem.phases[array.producer]
                if problem.makers[index]:
                    readers = {reader for reader in readers if problem.phases[reader] == phase} or readers
                self._freed[array.producer] -= array.size_bytes
            self._readers.append(readers)
            for reader in readers:
                self._read[reader].append(index)
            self._note_last(index)

    def order(self) -> tuple[OperatorIndex, ...]:
        """Return the order."""
        ready = [(self._place[each], each) for each, count in enumerate(self._missing) if not count]
        heapq.heapify(ready)
        done: dict[OperatorIndex, None] = {}
        while ready:
            todo = [heapq.heappop(ready)[1]]
            while todo:
                operator = todo.pop()
                if operator in done:
                    continue
                done[operator] = None
                changed = self._run(operator)
                for following in self._step.successors[operator]:
                    self._missing[following] -= 1
                    if not self._missing[following]:
                        heapq.heappush(ready, (self._place[following], following))
                        changed.add(following)
                early = (each for each in changed if not self._missing[each] and self._freed[each] >= 0)
                todo += sorted(early, key=self._place.__getitem__, reverse=True)
        return tuple(done)

    def _run(self, operator: OperatorIndex) -> set[OperatorIndex]:
        """Note what an operator has read; return those that are now the last to read something."""
        for array in self._read[operator]:
            self._readers[array].discard(operator)
        return {last for array in self._read[operator] for last in self._note_last(array)}

    def _note_last(self, array: ArrayIndex) -> set[OperatorIndex]:
        """Note what the only reader that is left frees; return it."""
        if len(self._readers[array]) != 1:
            return set()
        (last,) = self._readers[array]
        self._freed[last] += self._step.arrays[array].size_bytes
        return {last}
