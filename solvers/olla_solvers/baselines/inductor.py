"""Reorders for memory by the three heuristics of TorchInductor, on a :class:`Problem`.

Written anew after ``torch/_inductor/memory.py`` (PyTorch 2.11 to 2.13), to compare with: *lpmf*, least peak
memory first (Dutta et al., "Buffer memory optimization for video codec application modeled in Simulink",
DAC 2006), *bfs*, the operator whose predecessors ran earliest, and *dfs*, depth first from the operators that
touch least memory. Sizes are those of planned arrays.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Mapping
from types import MappingProxyType

from olla_solvers.problem import Bytes, OperatorIndex, Problem

Heuristic = Callable[[Problem], tuple[OperatorIndex, ...]]
"""From a problem to an order."""

_NONE = (float("inf"), -1)


class _SmallestBefore:
    """Finds the smallest of the keys in a prefix of positions: a segment tree."""

    def __init__(self, count: int) -> None:
        self._leaves = 1 << max(0, count - 1).bit_length()
        self._smallest: list[tuple[float, int]] = [_NONE] * (2 * self._leaves)

    def put(self, position: int, key: tuple[float, int]) -> None:
        """Set a position's key."""
        smallest, node = self._smallest, self._leaves + position
        smallest[node] = key
        while node > 1:
            node >>= 1
            smallest[node] = min(smallest[2 * node], smallest[2 * node + 1])

    def before(self, end: int) -> tuple[float, int]:
        """Return the smallest key at positions below the end."""
        smallest, node = _NONE, self._leaves + end
        if end == self._leaves:
            return self._smallest[1]
        while node > 1:
            if node & 1:
                smallest = min(smallest, self._smallest[node - 1])
            node >>= 1
        return smallest


def lpmf(problem: Problem) -> tuple[OperatorIndex, ...]:
    """Return the order of least peak memory first.

    Among the operators whose outputs fit under the peak so far the one after which least is alive; if
    none fits, the one with the smallest outputs. The operators stand sorted by their outputs, so that those
    that fit are a prefix.

    Args:
        problem: the graph.

    Returns:
        An order.
    """
    made, reads = _arrays(problem)
    unread = [len(array.consumers) for array in problem.planned]
    freed = _freed_alone(problem)
    missing = [len(direct) for direct in problem.predecessors]
    by_size = sorted(range(len(made)), key=lambda v: made[v])
    position = {operator: at for at, operator in enumerate(by_size)}
    sizes = [made[operator] for operator in by_size]
    fitting = _SmallestBefore(len(made))
    smallest: list[tuple[Bytes, Bytes, OperatorIndex]] = []
    ready: set[OperatorIndex] = set()

    def note(operator: OperatorIndex) -> None:
        net = made[operator] - freed[operator]
        fitting.put(position[operator], (net, operator))
        heapq.heappush(smallest, (made[operator], net, operator))

    def add(operators: list[OperatorIndex]) -> None:
        ready.update(operators)
        for operator in operators:
            note(operator)

    add([operator for operator, count in enumerate(missing) if count == 0])
    order: list[OperatorIndex] = []
    gap = 0
    while ready:
        chosen = fitting.before(bisect_right(sizes, gap))[1]
        while chosen < 0:
            operator = heapq.heappop(smallest)[2]
            chosen = operator if operator in ready else -1
        ready.remove(chosen)
        fitting.put(position[chosen], _NONE)
        order.append(chosen)
        gap = max(gap, made[chosen]) - made[chosen] + freed[chosen]
        add(_released(problem, chosen, missing))
        for index in reads[chosen]:
            unread[index] -= 1
            if unread[index] == 1:
                for consumer in problem.planned[index].consumers:
                    freed[consumer] += problem.planned[index].size_bytes
                    if consumer in ready:
                        note(consumer)
    return tuple(order)


def bfs(problem: Problem) -> tuple[OperatorIndex, ...]:
    """Return the order that takes first the operator whose predecessors ran earliest.

    Args:
        problem: the graph.

    Returns:
        An order.
    """
    missing = [len(direct) for direct in problem.predecessors]
    ready: list[tuple[list[int], OperatorIndex]] = [
        ([], operator) for operator, count in enumerate(missing) if count == 0
    ]
    position: dict[OperatorIndex, int] = {}
    while ready:
        chosen = heapq.heappop(ready)[1]
        position[chosen] = len(position)
        for operator in _released(problem, chosen, missing):
            heapq.heappush(ready, (sorted(position[v] for v in problem.predecessors[operator]), operator))
    return tuple(position)


def dfs(problem: Problem) -> tuple[OperatorIndex, ...]:
    """Return the depth-first order: before an operator its needs, those that touch least memory first.

    Args:
        problem: the graph.

    Returns:
        An order.
    """
    made, reads = _arrays(problem)
    touched = [
        size + sum(problem.planned[index].size_bytes for index in reads[operator])
        for operator, size in enumerate(made)
    ]
    order: dict[OperatorIndex, None] = {}
    todo = sorted(range(len(made)), key=lambda v: (touched[v], v), reverse=True)
    while todo:
        operator = todo[-1]
        if operator in order:
            todo.pop()
            continue
        waiting = [earlier for earlier in problem.predecessors[operator] if earlier not in order]
        if not waiting:
            order[todo.pop()] = None
        else:
            todo += sorted(waiting, key=lambda v: (touched[v], v), reverse=True)
    return tuple(order)


HEURISTICS: Mapping[str, Heuristic] = MappingProxyType({"lpmf": lpmf, "bfs": bfs, "dfs": dfs})


def _arrays(problem: Problem) -> tuple[list[Bytes], list[list[int]]]:
    """Return for each operator the bytes it makes and the planned arrays it reads."""
    made: list[Bytes] = [0] * len(problem.operators)
    reads: list[list[int]] = [[] for _ in problem.operators]
    for index, array in enumerate(problem.planned):
        if array.producer is not None:
            made[array.producer] += array.size_bytes
        for consumer in array.consumers:
            reads[consumer].append(index)
    return made, reads


def _freed_alone(problem: Problem) -> list[Bytes]:
    """Return for each operator the bytes that it alone reads, or makes for nobody."""
    freed = [0] * len(problem.operators)
    for array in problem.planned:
        if array.producer is not None and not array.consumers:
            freed[array.producer] += array.size_bytes
        elif len(array.consumers) == 1:
            freed[array.consumers[0]] += array.size_bytes
    return freed


def _released(problem: Problem, chosen: OperatorIndex, missing: list[int]) -> list[OperatorIndex]:
    """Count a finished operator off its successors; return those that have become ready."""
    released = []
    for successor in problem.successors[chosen]:
        missing[successor] -= 1
        if missing[successor] == 0:
            released.append(successor)
    return released
