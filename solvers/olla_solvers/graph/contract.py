"""Merges operators that some best order runs back to back, until nothing merges.

In this module live(S) is what is alive after the operators S, ``made`` what an operator leaves behind,
``rise`` what it adds while it runs; G(v) are the bytes that v frees in every order (all other consumers
precede it), F(v) those that it frees in any (no consumer follows it). live is submodular, so an operator
never frees less, and never leaves more, when more operators have run before it.

Each rule keeps the smallest peak. For the first two, take any order and move one operator:

* :func:`_follower`: v goes right after its only direct predecessor p if ``made(v) <= G(v)`` and
  ``made(p) - G(p) + rise(v) <= rise(p)``. All that v needs has run after p. Every step that v moves ahead
  of sees v done, hence no more alive. v's own step now costs at most live + made(p) - G(p) + rise(v), no
  more than p's. So the peak does not grow, and the pair rises by rise(p).
* :func:`_leader`: u goes right before its only direct successor w if ``F(u) = G(u) <= made(u)`` and
  ``rise(u) - made(u) + F(u) <= rise(w)``. u changes what is alive by made(u) - F(u) >= 0 wherever it runs,
  so every step that u is moved behind sees no more alive. u's own step then costs live + rise(u) with
  live = (live before w) - made(u) + F(u), no more than w's step. The pair rises by
  made(u) - F(u) + rise(w).
* :func:`_edge_operators`: an operator without predecessors that leaves nothing behind goes first: there
  it costs its rise alone, the least it can anywhere, and no other step changes. One without successors
  that leaves nothing behind and can free nothing goes last, for the same reasons.

Merging only adds precedence, so G grows, F shrinks, and merges that were allowed together stay allowed;
each operator takes part in at most one a round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.graph.flow import FlowArray, FlowGraph, flow_graph
from olla_solvers.problem import Bytes, OperatorIndex


@dataclass(frozen=True, slots=True)
class Contracted:
    """A smaller graph with the same smallest peak.

    Attributes:
        flow: the smaller graph.
        parts: for each of its operators, those of the original graph, in the order they run.
        first: operators of the original graph that run before all others.
        last: those that run after all others.
        floor_bytes: what those of ``first`` and ``last`` need, each alone: the original's smallest peak
            is the larger one of this and the smaller graph's.
    """

    flow: FlowGraph
    parts: tuple[tuple[OperatorIndex, ...], ...]
    first: tuple[OperatorIndex, ...] = ()
    last: tuple[OperatorIndex, ...] = ()
    floor_bytes: Bytes = 0

    def expand(self, order: Sequence[OperatorIndex]) -> tuple[OperatorIndex, ...]:
        """Return an order of the original graph from one of the smaller graph."""
        middle = (original for operator in order for original in self.parts[operator])
        return (*self.first, *middle, *self.last)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two operators to run as one, which rises by ``rise_bytes`` and stands where ``position`` stood."""

    earlier: OperatorIndex
    later: OperatorIndex
    rise_bytes: Bytes
    position: OperatorIndex


def unchanged(flow: FlowGraph) -> Contracted:
    """Return a graph as if it had been contracted, without any merge."""
    return Contracted(flow, tuple((operator,) for operator in range(flow.count)))


def contract(flow: FlowGraph, deadline: float = float("inf")) -> Contracted:
    """Apply every rule until none applies.

    Args:
        flow: the original graph.
        deadline: ``time.monotonic()`` after which no further round is begun.

    Returns:
        The smaller graph and the way back.
    """
    current = unchanged(flow)
    round_seconds = 0.0
    while True:
        start = time.monotonic()
        if start + round_seconds > deadline:
            return current
        smaller = _without_edge_operators(current)
        pairs = _pairs(smaller.flow)
        if pairs:
            smaller = _merged(smaller, pairs)
        if smaller.flow.count == current.flow.count:
            return smaller
        current = smaller
        round_seconds = time.monotonic() - start


def _edge_operators(flow: FlowGraph) -> tuple[list[OperatorIndex], list[OperatorIndex]]:
    """Return operators to run first, and operators to run last."""
    idle = [
        operator
        for operator in range(flow.count)
        if not flow.made_bytes[operator] and not flow.inputs[operator]
    ]
    first = [operator for operator in idle if not flow.predecessors[operator]]
    last = [operator for operator in idle if not flow.successors[operator] and flow.predecessors[operator]]
    return first, last


def _without_edge_operators(current: Contracted) -> Contracted:
    flow = current.flow
    first, last = _edge_operators(flow)
    if not first and not last:
        return current
    gone = {*first, *last}
    kept = [operator for operator in range(flow.count) if operator not in gone]
    number = {operator: position for position, operator in enumerate(kept)}
    smaller = FlowGraph(
        rise_bytes=tuple(flow.rise_bytes[operator] for operator in kept),
        arrays=tuple(
            FlowArray(array.size_bytes, number[array.producer], tuple(number[c] for c in array.consumers))
            for array in flow.arrays
        ),
        predecessors=tuple(
            tuple(number[earlier] for earlier in flow.predecessors[operator] if earlier not in gone)
            for operator in kept
        ),
    )
    return Contracted(
        smaller,
        tuple(current.parts[operator] for operator in kept),
        (*current.first, *(original for operator in first for original in current.parts[operator])),
        (*(original for operator in last for original in current.parts[operator]), *current.last),
        max(current.floor_bytes, *(flow.rise_bytes[operator] for operator in gone)),
    )


def freed_bytes(flow: FlowGraph, operator: OperatorIndex) -> tuple[Bytes, Bytes]:
    """Return G and F of an operator.

    Args:
        flow: the graph.
        operator: one of it.

    Returns:
        Bytes that the operator frees in every order, and those that it may free in some.
    """
    surely, possibly = 0, 0
    above, below = flow.ancestors[operator] | 1 << operator, flow.descendants[operator]
    for index in flow.inputs[operator]:
        array = flow.arrays[index]
        if all(above >> consumer & 1 for consumer in array.consumers):
            surely += array.size_bytes
        if not any(below >> consumer & 1 for consumer in array.consumers):
            possibly += array.size_bytes
    return surely, possibly


def _pairs(flow: FlowGraph) -> list[_Pair]:
    """Return disjoint pairs to merge in one round."""
    freed = [freed_bytes(flow, operator) for operator in range(flow.count)]
    taken: set[OperatorIndex] = set()
    pairs = []
    for operator in range(flow.count):
        for pair in (_follower(flow, freed, operator), _leader(flow, freed, operator)):
            if pair is not None and taken.isdisjoint((pair.earlier, pair.later)):
                taken.update((pair.earlier, pair.later))
                pairs.append(pair)
    return pairs


def _follower(flow: FlowGraph, freed: Sequence[tuple[Bytes, Bytes]], later: OperatorIndex) -> _Pair | None:
    if len(flow.predecessors[later]) != 1:
        return None
    earlier = flow.predecessors[later][0]
    made, rise = flow.made_bytes, flow.rise_bytes
    if made[later] > freed[later][0] or made[earlier] - freed[earlier][0] + rise[later] > rise[earlier]:
        return None
    return _Pair(earlier, later, rise[earlier], earlier)


def _leader(flow: FlowGraph, freed: Sequence[tuple[Bytes, Bytes]], earlier: OperatorIndex) -> _Pair | None:
    if len(flow.successors[earlier]) != 1:
        return None
    later = flow.successors[earlier][0]
    surely, possibly = freed[earlier]
    kept = flow.made_bytes[earlier] - possibly
    if surely != possibly or kept < 0 or flow.rise_bytes[earlier] - kept > flow.rise_bytes[later]:
        return None
    return _Pair(earlier, later, kept + flow.rise_bytes[later], later)


def _merged(current: Contracted, pairs: Sequence[_Pair]) -> Contracted:
    """Make one operator of each pair, in the place that keeps the sequence executable."""
    flow = current.flow
    of_operator = {operator: pair for pair in pairs for operator in (pair.earlier, pair.later)}
    number: dict[OperatorIndex, int] = {}
    parts: list[tuple[OperatorIndex, ...]] = []
    rise: list[Bytes] = []
    for operator in range(flow.count):
        pair = of_operator.get(operator)
        if pair is None:
            number[operator] = len(parts)
            parts.append(current.parts[operator])
            rise.append(flow.rise_bytes[operator])
        elif operator == pair.position:
            number[pair.earlier] = number[pair.later] = len(parts)
            parts.append(current.parts[pair.earlier] + current.parts[pair.later])
            rise.append(pair.rise_bytes)
    edges = [
        (number[earlier], number[later])
        for later, direct in enumerate(flow.predecessors)
        for earlier in direct
        if number[earlier] != number[later]
    ]
    return Contracted(
        flow_graph(rise, _renumbered(flow.arrays, number), edges),
        tuple(parts),
        current.first,
        current.last,
        current.floor_bytes,
    )


def _renumbered(arrays: Sequence[FlowArray], number: dict[OperatorIndex, int]) -> list[FlowArray]:
    """Return the arrays between merged operators; those inside one disappear, and equal ones merge."""
    sizes: dict[tuple[int, tuple[int, ...]], Bytes] = {}
    for array in arrays:
        producer = number[array.producer]
        consumers = tuple(sorted({number[reader] for reader in array.consumers} - {producer}))
        if consumers:
            key = (producer, consumers)
            sizes[key] = sizes.get(key, 0) + array.size_bytes
    return [FlowArray(size, *key) for key, size in sizes.items()]
