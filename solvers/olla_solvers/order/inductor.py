"""The three heuristics with which TorchInductor reorders for memory, on a :class:`Problem`.

Written anew after ``torch/_inductor/memory.py`` (PyTorch 2.11 to 2.13), to be compared with and never to
be worse than: *lpmf*, least peak memory first (Dutta et al., "Buffer memory optimization for video codec
application modeled in Simulink", DAC 2006), *bfs*, the operator whose predecessors ran earliest, and
*dfs*, depth first from the operators that touch least memory. Sizes are those of planned arrays.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from olla_solvers.errors import NoSolutionError
from olla_solvers.problem import Bytes, OperatorIndex, Problem

Heuristic = Callable[[Problem, float], tuple[OperatorIndex, ...]]
"""From a problem and a ``time.monotonic()`` deadline to an order."""


def lpmf(problem: Problem, deadline: float = float("inf")) -> tuple[OperatorIndex, ...]:
    """Least peak memory first.

    Among the operators whose outputs fit under the peak so far the one after which least is alive; where
    none fits, the one with the smallest outputs.

    Args:
        problem: the graph.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        An order.

    Raises:
        NoSolutionError: when the deadline passed.
    """
    made, reads = _arrays(problem)
    unread = [len(array.consumers) for array in problem.planned]
    freed = [0] * len(problem.operators)
    for index, array in enumerate(problem.planned):
        if array.producer is not None and not array.consumers:
            freed[array.producer] += array.size_bytes
        elif unread[index] == 1:
            freed[array.consumers[0]] += array.size_bytes
    missing = [len(each) for each in problem.predecessors]
    ready = {operator for operator, count in enumerate(missing) if count == 0}
    order: list[OperatorIndex] = []
    gap = 0
    while ready:
        _check(deadline)
        chosen = min(ready, key=lambda v: (made[v] if made[v] > gap else 0, made[v] - freed[v], v))
        ready.remove(chosen)
        order.append(chosen)
        gap = max(gap, made[chosen]) - made[chosen] + freed[chosen]
        ready.update(_released(problem, chosen, missing))
        for index in reads[chosen]:
            unread[index] -= 1
            if unread[index] == 1:
                for consumer in problem.planned[index].consumers:
                    freed[consumer] += problem.planned[index].size_bytes
    return tuple(order)


def bfs(problem: Problem, deadline: float = float("inf")) -> tuple[OperatorIndex, ...]:
    """First the operator whose predecessors ran earliest.

    Args:
        problem: the graph.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        An order.

    Raises:
        NoSolutionError: when the deadline passed.
    """
    missing = [len(each) for each in problem.predecessors]
    ready: list[tuple[list[int], OperatorIndex]] = [
        ([], operator) for operator, count in enumerate(missing) if count == 0
    ]
    position: dict[OperatorIndex, int] = {}
    while ready:
        _check(deadline)
        chosen = heapq.heappop(ready)[1]
        position[chosen] = len(position)
        for operator in _released(problem, chosen, missing):
            heapq.heappush(ready, (sorted(position[v] for v in problem.predecessors[operator]), operator))
    return tuple(position)


def dfs(problem: Problem, deadline: float = float("inf")) -> tuple[OperatorIndex, ...]:
    """Depth first: before an operator what it needs, those that touch least memory first.

    Args:
        problem: the graph.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        An order.

    Raises:
        NoSolutionError: when the deadline passed.
    """
    made, reads = _arrays(problem)
    touched = [
        size + sum(problem.planned[index].size_bytes for index in reads[operator])
        for operator, size in enumerate(made)
    ]
    order: dict[OperatorIndex, None] = {}
    todo = sorted(range(len(made)), key=lambda v: (touched[v], v), reverse=True)
    while todo:
        _check(deadline)
        operator = todo[-1]
        waiting = [each for each in problem.predecessors[operator] if each not in order]
        if operator in order or not waiting:
            order[todo.pop()] = None
        else:
            todo += sorted(waiting, key=lambda v: (touched[v], v), reverse=True)
    return tuple(order)


HEURISTICS: Mapping[str, Heuristic] = MappingProxyType({"lpmf": lpmf, "bfs": bfs, "dfs": dfs})


def _arrays(problem: Problem) -> tuple[list[Bytes], list[list[int]]]:
    """For each operator the bytes it makes and the planned arrays it reads."""
    made: list[Bytes] = [0] * len(problem.operators)
    reads: list[list[int]] = [[] for _ in problem.operators]
    for index, array in enumerate(problem.planned):
        if array.producer is not None:
            made[array.producer] += array.size_bytes
        for consumer in array.consumers:
            reads[consumer].append(index)
    return made, reads


def _released(problem: Problem, chosen: OperatorIndex, missing: list[int]) -> list[OperatorIndex]:
    """Count a finished operator off its successors; those that nothing holds back any more."""
    released = []
    for successor in problem.successors[chosen]:
        missing[successor] -= 1
        if missing[successor] == 0:
            released.append(successor)
    return released


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise NoSolutionError("the heuristic was not done by its deadline")
