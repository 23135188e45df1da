"""What an order costs, and what every order must cost.

Resident sets and lifetimes of a given order (OLLA §2.2), the ranges in which operators can run and arrays
can live (OLLA §4.1, equations 10-12), reachability (OLLA §4.2, Function 2, for all pairs at once in
bitsets), and the precedence lower bound: at an operator, every array made by it or an ancestor and read by
it or a descendant is alive in every order.

One operator runs at a timestep, so an operator's earliest timestep is its number of ancestors; this is at
least the longest distance to an input that equation 10 uses. Bitsets are Python integers: bit u of
``ancestors[v]`` says that u precedes v.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olla_solvers.problem import Array, Bytes, OperatorIndex, Problem, Timestep


@dataclass(frozen=True, slots=True)
class Range:
    """Timesteps ``[lower, upper)``; empty when ``upper <= lower``."""

    lower: Timestep
    upper: Timestep

    def __contains__(self, timestep: Timestep) -> bool:
        """Whether the timestep lies in the range."""
        return self.lower <= timestep < self.upper


def captured_order(problem: Problem) -> tuple[OperatorIndex, ...]:
    """The operators as listed, or, where the list is not executable, the nearest order that is.

    Args:
        problem: the graph.

    Returns:
        Operator indices; of all topological orders the one that is smallest in dictionary order.
    """
    missing = [len(each) for each in problem.predecessors]
    ready = [operator for operator, count in enumerate(missing) if count == 0]
    order: list[OperatorIndex] = []
    while ready:
        operator = heapq.heappop(ready)
        order.append(operator)
        for successor in problem.successors[operator]:
            missing[successor] -= 1
            if missing[successor] == 0:
                heapq.heappush(ready, successor)
    return tuple(order)


def lifetimes(problem: Problem, order: Sequence[OperatorIndex]) -> dict[str, Range]:
    """When each planned array is alive.

    Args:
        problem: the graph.
        order: operator indices, first to last.

    Returns:
        Array name to ``[producer's timestep, last consumer's timestep + 1)``; an unread array lives for
        its producer's timestep alone.
    """
    timestep = timesteps(order)
    found = {}
    for array in problem.planned:
        first, last = _first_and_last(array, timestep)
        found[array.name] = Range(first, last + 1)
    return found


def resident_bytes(problem: Problem, order: Sequence[OperatorIndex]) -> tuple[Bytes, ...]:
    """Size of the resident set at every timestep: planned arrays alive, and the running workspace.

    Args:
        problem: the graph.
        order: operator indices, first to last.

    Returns:
        Bytes for each timestep.
    """
    timestep = timesteps(order)
    change = [0] * (len(order) + 1)
    for array in problem.planned:
        first, last = _first_and_last(array, timestep)
        change[first] += array.size_bytes
        change[last + 1] -= array.size_bytes
    resident: list[Bytes] = []
    alive = 0
    for operator, difference in zip(order, change, strict=False):
        alive += difference
        resident.append(alive + problem.operators[operator].workspace_bytes)
    return tuple(resident)


def peak_bytes(problem: Problem, order: Sequence[OperatorIndex]) -> Bytes:
    """Largest resident set of an order, in bytes; 0 for an empty graph.

    Args:
        problem: the graph.
        order: operator indices, first to last.

    Returns:
        Bytes of planned arrays and workspaces; static and output arrays are not counted.
    """
    return max(resident_bytes(problem, order), default=0)


def timesteps(order: Sequence[OperatorIndex]) -> list[Timestep]:
    """The inverse of an order: for each operator, its timestep."""
    timestep = [0] * len(order)
    for position, operator in enumerate(order):
        timestep[operator] = position
    return timestep


def ancestors(predecessors: Sequence[Sequence[OperatorIndex]], order: Sequence[OperatorIndex]) -> list[int]:
    """For each operator the bitset of those that run before it in every order.

    Given successors and a reversed order, the descendants.

    Args:
        predecessors: for each operator, those with an edge to it.
        order: any topological order.

    Returns:
        One bitset an operator, itself not included.
    """
    reached = [0] * len(predecessors)
    for operator in order:
        bits = 0
        for predecessor in predecessors[operator]:
            bits |= reached[predecessor] | 1 << predecessor
        reached[operator] = bits
    return reached


def reachability(problem: Problem) -> tuple[list[int], list[int]]:
    """Ancestors and descendants of every operator (OLLA Function 2), as bitsets.

    Args:
        problem: the graph.

    Returns:
        The two lists.
    """
    order = captured_order(problem)
    return ancestors(problem.predecessors, order), ancestors(problem.successors, order[::-1])


def operator_spans(problem: Problem) -> tuple[Range, ...]:
    """SPAN(v) = [ASAP(v), ALAP(v)] of equation 10, half open, with one operator a timestep.

    Args:
        problem: the graph.

    Returns:
        The range of timesteps at which each operator can run.
    """
    above, below = reachability(problem)
    count = len(problem.operators)
    return tuple(
        Range(up.bit_count(), count - down.bit_count()) for up, down in zip(above, below, strict=True)
    )


def useful_lifetime(array: Array, spans: Sequence[Range]) -> Range:
    """MUL(e) of equation 11: when a planned or output array can be alive at all.

    Args:
        array: one with a producer.
        spans: from :func:`operator_spans`.

    Returns:
        From the producer's earliest to the latest consumer's latest timestep, half open.

    Raises:
        ValueError: when nothing produces the array, whose lifetime is then not bounded by any operator.
    """
    producer = _producer(array)
    latest = max((spans[consumer].upper for consumer in array.consumers), default=spans[producer].upper)
    return Range(spans[producer].lower, latest)


def preserved_range(array: Array, spans: Sequence[Range]) -> Range:
    """PRES(e) of equation 12: when an array is alive in every order.

    Args:
        array: one with a producer.
        spans: from :func:`operator_spans`.

    Returns:
        From after the producer's latest to the last consumer's earliest timestep, half open; may be empty.

    Raises:
        ValueError: when nothing produces the array.
    """
    earliest = max((spans[consumer].lower for consumer in array.consumers), default=-1)
    return Range(spans[_producer(array)].upper, earliest + 1)


def precedence_bound(problem: Problem) -> Bytes:
    """Bytes that some operator needs in every order: no peak is smaller.

    At operator v: the planned arrays made by v or an ancestor and read by v or a descendant, v's own
    outputs, and v's workspace.

    Args:
        problem: the graph.

    Returns:
        The largest such sum.
    """
    above, below = reachability(problem)
    count = len(problem.operators)
    needed = np.array([operator.workspace_bytes for operator in problem.operators], dtype=np.int64)
    for array in problem.planned:
        alive = 1 << _producer(array)
        for consumer in array.consumers:
            alive |= above[consumer] | 1 << consumer
        alive &= below[_producer(array)] | 1 << _producer(array)
        needed[members(alive, count)] += array.size_bytes
    return int(needed.max(initial=0))


def members(bits: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The positions of a bitset's ones, ascending.

    Args:
        bits: the set.
        count: positions there are.

    Returns:
        Indices below ``count``.
    """
    raw = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))


def _first_and_last(array: Array, timestep: Sequence[Timestep]) -> tuple[Timestep, Timestep]:
    first = timestep[_producer(array)]
    return first, max((timestep[consumer] for consumer in array.consumers), default=first)


def _producer(array: Array) -> OperatorIndex:
    if array.producer is None:
        raise ValueError(f"{array.kind} array {array.name!r} has no producer, so no lifetime of its own")
    return array.producer
