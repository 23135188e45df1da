"""The graph that ordering works on: how far each operator raises memory, and what it leaves behind.

Planned arrays that nobody reads and workspaces live and die inside their operator, so they only add to
its ``rise_bytes``; planned arrays with equal producer and consumers are one array; static and output
arrays only order operators. Edges that follow from others are dropped (transitive reduction). None of
this changes the cost of any order.

Running operator v where S has run costs ``live(S) + rise_bytes[v]``, where ``live(S)`` counts the arrays
whose producer, but not every consumer, is in S. The peak of an order is its largest cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from olla_solvers.analysis import timesteps
from olla_solvers.graph.bitsets import ancestors, members
from olla_solvers.problem import Bytes, OperatorIndex, Problem


@dataclass(frozen=True, slots=True)
class FlowArray:
    """Bytes alive from their producer's timestep to their last consumer's; never unread.

    Attributes:
        size_bytes: positive.
        producer: makes it.
        consumers: read it; ascending, at least one.
    """

    size_bytes: Bytes
    producer: OperatorIndex
    consumers: tuple[OperatorIndex, ...]


@dataclass(frozen=True)
class FlowGraph:
    """Operators, in an executable sequence, with what they raise, make and free.

    Attributes:
        rise_bytes: for each operator the most bytes it adds while it runs, its outputs included.
        arrays: those that outlive their producer.
        predecessors: for each operator the direct ones, transitively reduced; all have smaller indices.
    """

    rise_bytes: tuple[Bytes, ...]
    arrays: tuple[FlowArray, ...]
    predecessors: tuple[tuple[OperatorIndex, ...], ...]

    @property
    def count(self) -> int:
        """Number of operators."""
        return len(self.rise_bytes)

    @cached_property
    def successors(self) -> tuple[tuple[OperatorIndex, ...], ...]:
        """For each operator the direct ones, ascending."""
        lists: list[list[OperatorIndex]] = [[] for _ in self.predecessors]
        for operator, direct in enumerate(self.predecessors):
            for predecessor in direct:
                lists[predecessor].append(operator)
        return tuple(map(tuple, lists))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operator the bitset of those before it in every order."""
        return tuple(ancestors(self.predecessors, range(self.count)))

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each operator the bitset of those after it in every order."""
        return tuple(ancestors(self.successors, range(self.count)[::-1]))

    @cached_property
    def made_bytes(self) -> tuple[Bytes, ...]:
        """For each operator the bytes it makes that outlive it."""
        made = [0] * self.count
        for array in self.arrays:
            made[array.producer] += array.size_bytes
        return tuple(made)

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each operator the indices of the arrays it reads."""
        lists: list[list[int]] = [[] for _ in self.rise_bytes]
        for index, array in enumerate(self.arrays):
            for consumer in array.consumers:
                lists[consumer].append(index)
        return tuple(map(tuple, lists))

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """For each operator the indices of the arrays it makes."""
        lists: list[list[int]] = [[] for _ in self.rise_bytes]
        for index, array in enumerate(self.arrays):
            lists[array.producer].append(index)
        return tuple(map(tuple, lists))

    def costs(self, order: Sequence[OperatorIndex]) -> tuple[Bytes, ...]:
        """Return the bytes needed while each operator of an order runs, first to last."""
        unread = [len(array.consumers) for array in self.arrays]
        live, costs = 0, []
        for operator in order:
            costs.append(live + self.rise_bytes[operator])
            live += self.made_bytes[operator]
            for index in self.inputs[operator]:
                unread[index] -= 1
                if unread[index] == 0:
                    live -= self.arrays[index].size_bytes
        return tuple(costs)

    def peak_bytes(self, order: Sequence[OperatorIndex]) -> Bytes:
        """Return the largest cost over an order; 0 if there is no operator."""
        return max(self.costs(order), default=0)

    def is_executable(self, order: Sequence[OperatorIndex]) -> bool:
        """Return True if every operator of an order runs after all that it needs."""
        done = 0
        for operator in order:
            if self.ancestors[operator] & ~done:
                return False
            done |= 1 << operator
        return True

    @cached_property
    def precedence_bytes(self) -> tuple[Bytes, ...]:
        """For each operator what is alive while it runs in every order: its precedence bound.

        Arrays made by an ancestor and read by it or a descendant, and its own rise.
        """
        needed = np.array(self.rise_bytes, dtype=np.int64)
        for array in self.arrays:
            alive = 0
            for consumer in array.consumers:
                alive |= self.ancestors[consumer] | 1 << consumer
            alive &= self.descendants[array.producer]
            needed[members(alive, self.count)] += array.size_bytes
        return tuple(map(int, needed))


@dataclass(frozen=True, slots=True)
class Candidate:
    """An order of a flow graph.

    Attributes:
        order: operator indices.
        peak_bytes: its largest cost.
        rule: the method that made it.
    """

    order: tuple[OperatorIndex, ...]
    peak_bytes: Bytes
    rule: str


def flow_of(problem: Problem) -> tuple[FlowGraph, tuple[OperatorIndex, ...]]:
    """Return a problem's flow graph, and for each of its operators the problem's operator.

    Args:
        problem: the graph.

    Returns:
        The flow graph, whose operators are in captured order, and the problem's indices in that order.
    """
    order = problem.captured_order
    position = timesteps(order)
    rise = [problem.operators[operator].workspace_bytes for operator in order]
    sizes: dict[tuple[int, tuple[int, ...]], Bytes] = {}
    for array in problem.planned:
        if array.producer is None or array.size_bytes == 0:
            continue
        producer = position[array.producer]
        rise[producer] += array.size_bytes
        if array.consumers:
            key = (producer, tuple(sorted(position[consumer] for consumer in array.consumers)))
            sizes[key] = sizes.get(key, 0) + array.size_bytes
    edges = ((position[earlier], position[later]) for earlier, later in problem.edges)
    return flow_graph(rise, [FlowArray(size, *key) for key, size in sizes.items()], edges), order


def flow_graph(
    rise_bytes: Sequence[Bytes],
    arrays: Sequence[FlowArray],
    edges: Iterable[tuple[OperatorIndex, OperatorIndex]],
) -> FlowGraph:
    """Make a flow graph from edges that may repeat or follow from one another.

    Args:
        rise_bytes: for each operator.
        arrays: at most one with a given producer and consumers.
        edges: pairs (u, v) with u < v, those that arrays imply included.

    Returns:
        The graph with its edges reduced.
    """
    direct: list[set[OperatorIndex]] = [set() for _ in rise_bytes]
    for earlier, later in edges:
        direct[later].add(earlier)
    reached: list[int] = []
    reduced: list[tuple[OperatorIndex, ...]] = []
    for candidates in direct:
        bits, kept = 0, []
        # The latest first: what it reaches needs no edge of its own.
        for predecessor in sorted(candidates, reverse=True):
            if not bits >> predecessor & 1:
                kept.append(predecessor)
                bits |= reached[predecessor] | 1 << predecessor
        reached.append(bits)
        reduced.append(tuple(reversed(kept)))
    return FlowGraph(tuple(rise_bytes), tuple(arrays), tuple(reduced))
