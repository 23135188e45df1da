"""An order of a step that suits repetitions, to begin from beside the one with the smallest peak.

An order of the smallest peak defers what makes little room, such as the gradients of weights or their norms,
and with it what they read. Where arrays are dropped after their last reader of their own phase and made again
for later ones, what is read early is gone early. Where weights are used many times, as in a network that is
unrolled over time, the captured order works on all their gradients from the beginning of backward to its
end. One layer after the other has few of them at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from olla_solvers.problem import ArrayKind, Bytes, OperatorIndex
from olla_solvers.recomputation.problem import ArrayIndex, RecomputationProblem

SAME_GROUP = 0.5
"""Results belong to a group if they take less than this share of the operators that its first one takes."""

INTERLEAVED = 2.0
"""Times its own length, in operators, that a group must extend over in the captured order, on average."""


def early_order(problem: RecomputationProblem) -> tuple[OperatorIndex, ...]:
    """Return the captured order, in which operators come early that make no more than they free.

    An array is taken to be free after its last reader; one that can be made again, after that of its phase.

    Args:
        problem: the step; its own order does not matter.
    """
    return _Early(problem).order()


def grouped_order(problem: RecomputationProblem) -> tuple[OperatorIndex, ...] | None:
    """Return the captured order, in which backward finishes a group of results before it begins the next.

    Results are gradients of weights, or updates: no operator of backward reads them, or one of a later phase
    does. The one that takes fewest operators comes first, with all those that then take few more.

    Args:
        problem: the step; its own order does not matter.

    Returns:
        None if the early order does not work on several groups at once.
    """
    phases, early = problem.phases, early_order(problem)
    backward = [operator for operator in early if phases[operator] == 1]
    groups = _groups(problem, backward)
    places: dict[int, list[int]] = {}
    for place, operator in enumerate(backward):
        places.setdefault(groups[operator], []).append(place)
    extent = sum(within[-1] - within[0] + 1 for within in places.values())
    if extent < INTERLEAVED * len(backward) or not backward:
        return None
    place_of = {operator: place for place, operator in enumerate(problem.problem.captured_order)}
    return tuple(
        sorted(place_of, key=lambda operator: (phases[operator], groups.get(operator, 0), place_of[operator]))
    )


def _groups(problem: RecomputationProblem, backward: Sequence[OperatorIndex]) -> dict[OperatorIndex, int]:
    """Return the number of the group in whose time each operator of backward comes."""
    step, phases = problem.problem, problem.phases
    taken: dict[OperatorIndex, int] = {}
    for place, operator in enumerate(backward):
        taken[operator] = 1 << place
        for before in step.predecessors[operator]:
            taken[operator] |= taken.get(before, 0)
    results = [
        operator
        for operator in backward
        if not any(phases[after] == 1 for after in step.successors[operator])
        or any(phases[after] > 1 for after in step.successors[operator])
    ]
    groups: dict[OperatorIndex, int] = {}
    done, group, first = 0, -1, 0
    for result in sorted(results, key=lambda result: taken[result].bit_count()):
        new = taken[result] & ~done
        done |= new
        if new.bit_count() > SAME_GROUP * first:
            group, first = group + 1, new.bit_count()
        while new:
            lowest = new & -new
            groups[backward[lowest.bit_length() - 1]] = group
            new ^= lowest
    return groups


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
        ready = [
            (self._place[operator], operator) for operator, count in enumerate(self._missing) if not count
        ]
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
                early = (
                    operator
                    for operator in changed
                    if not self._missing[operator] and self._freed[operator] >= 0
                )
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
