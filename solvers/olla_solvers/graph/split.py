"""Cuts a graph at the states that every order passes through.

If every operator of a set precedes every one outside it, all orders run the set first. The smallest
peak of the whole is then the largest of the pieces' smallest peaks, and best orders of the pieces, one
after another, are a best order of the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.graph.flow import FlowArray, FlowGraph
from olla_solvers.problem import OperatorIndex


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a graph, between two states that every order passes through.

    Attributes:
        flow: the part as a graph of its own. An operator before all others makes what is alive when the
            part begins, and one after all others reads what is alive when it ends; either only if
            there is something to make or read.
        parts: for each of its operators, the original one, or None for those two.
    """

    flow: FlowGraph
    parts: tuple[OperatorIndex | None, ...]

    def expand(self, order: Sequence[OperatorIndex]) -> tuple[OperatorIndex, ...]:
        """Return operators of the original graph from an order of the piece."""
        originals = (self.parts[operator] for operator in order)
        return tuple(operator for operator in originals if operator is not None)


def undivided(flow: FlowGraph) -> tuple[Piece, ...]:
    """Return the graph as one piece, or none if there is no operator."""
    return (Piece(flow, tuple(range(flow.count))),) if flow.count else ()


def split(flow: FlowGraph) -> tuple[Piece, ...]:
    """Return all pieces, in the order in which they run.

    Args:
        flow: the graph.

    Returns:
        Pieces whose operators partition the graph's.
    """
    sequence = sorted(range(flow.count), key=lambda operator: flow.ancestors[operator].bit_count())
    cuts = _forced_prefixes(flow, sequence)
    part_of = [0] * flow.count
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        for operator in sequence[start:end]:
            part_of[operator] = number
    through: list[list[FlowArray]] = [[] for _ in cuts[1:]]
    for array in flow.arrays:
        last = max(part_of[consumer] for consumer in array.consumers)
        for number in range(part_of[array.producer], last + 1):
            through[number].append(array)
    return tuple(
        _piece(flow, sorted(sequence[start:end]), through[number], number, part_of)
        for number, (start, end) in enumerate(itertools.pairwise(cuts))
    )


def piece_between(flow: FlowGraph, order: Sequence[OperatorIndex], start: int, end: int) -> Piece:
    """Return the part of a graph that an order runs from one position to before another, as a piece.

    Args:
        flow: the graph.
        order: an order of it.
        start: position of the first operator inside.
        end: position behind the last one.

    Returns:
        The piece: an order of it costs what it costs in the given order, between the operators outside.
    """
    part_of = [0] * flow.count
    for operator in order[start:end]:
        part_of[operator] = 1
    for operator in order[end:]:
        part_of[operator] = 2
    through = [
        array
        for array in flow.arrays
        if part_of[array.producer] <= 1 <= max(part_of[consumer] for consumer in array.consumers)
    ]
    return _piece(flow, sorted(order[start:end]), through, 1, part_of)


def _forced_prefixes(flow: FlowGraph, sequence: Sequence[OperatorIndex]) -> list[int]:
    """Return the lengths of prefixes that precede all the rest; a forced state is always such a prefix."""
    common = [0] * len(sequence)
    shared = (1 << flow.count) - 1
    for position in range(len(sequence) - 1, -1, -1):
        shared &= flow.ancestors[sequence[position]]
        common[position] = shared
    cuts, prefix = [0], 0
    for position, operator in enumerate(sequence):
        if position and common[position] & prefix == prefix:
            cuts.append(position)
        prefix |= 1 << operator
    return [*cuts, len(sequence)] if sequence else [0]


def _piece(
    flow: FlowGraph,
    inside: Sequence[OperatorIndex],
    arrays: Sequence[FlowArray],
    number: int,
    part_of: Sequence[int],
) -> Piece:
    """Make a part: its operators between one that stands for all before and one for all after."""
    entering = any(part_of[array.producer] < number for array in arrays)
    leaving = any(part_of[consumer] > number for array in arrays for consumer in array.consumers)
    shift = int(entering)
    local = {operator: position + shift for position, operator in enumerate(inside)}
    after = len(inside) + shift
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    for array in arrays:
        producer = local.get(array.producer, 0)
        # Consumers of earlier parts have run; one of a later part keeps the array to the end.
        readers = {local.get(reader, after) for reader in array.consumers if part_of[reader] >= number}
        key = (producer, (after,) if after in readers else tuple(sorted(readers)))
        sizes[key] = sizes.get(key, 0) + array.size_bytes
    entered = sum(size for (producer, _), size in sizes.items() if entering and producer == 0)
    sources = (0,) if entering else ()
    predecessors = [
        tuple(local[earlier] for earlier in flow.predecessors[operator] if earlier in local) or sources
        for operator in inside
    ]
    rise = [flow.rise_bytes[operator] for operator in inside]
    used = {operator for direct in predecessors for operator in direct}
    ends = tuple(operator for operator in range(shift, after) if operator not in used)
    return Piece(
        FlowGraph(
            rise_bytes=(*([entered] if entering else []), *rise, *([0] if leaving else [])),
            arrays=tuple(FlowArray(size, *key) for key, size in sizes.items()),
            predecessors=(*([()] if entering else []), *predecessors, *([ends] if leaving else [])),
        ),
        (*([None] if entering else []), *inside, *([None] if leaving else [])),
    )
