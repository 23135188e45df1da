"""States the joint program of order and addresses: OLLA equation 9, that is equations 1-8.

When operators run and arrays are preserved is stated as for ordering
(:mod:`olla_solvers.ilp.order_columns`). In addition every array, and every workspace, has an address A, and
for each pair that may be alive together one of two binaries puts one below the other at any timestep at which
both are alive (equation 6). M in equations 7a and 7b is the size of a known buffer, which no useful solution
exceeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from olla_solvers.graph.flow import FlowArray, FlowGraph, flow_graph
from olla_solvers.ilp.model import Column, Expression, LinearModel
from olla_solvers.ilp.order_columns import Lifetimes, TimedColumns, TimedModel, state_lifetimes, windows
from olla_solvers.ilp.order_program import resident_sets
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, Techniques
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset, OperatorIndex, Problem
from olla_solvers.spans import scratching, spans_of, unit_bytes

Address: TypeAlias = tuple[Column, float]
"""A column, and the units that one of it stands for."""


@dataclass(frozen=True)
class JointProgram:
    """The program and what is needed to read its solutions.

    Attributes:
        model: the linear program; its objective is the buffer in units.
        unit_bytes: bytes of one unit.
        lifetimes: the columns that say when operators run and arrays are preserved.
        operators: for each operator of the program the problem's.
        addresses: for each span of :func:`~olla_solvers.spans.spans_of` its address.
    """

    model: LinearModel
    unit_bytes: Bytes
    lifetimes: Lifetimes
    operators: tuple[OperatorIndex, ...]
    addresses: tuple[Address, ...]

    def order(self, values: Sequence[float]) -> tuple[OperatorIndex, ...]:
        """Return the problem's operators, first to last: Function 1."""
        return tuple(self.operators[operator] for operator in self.lifetimes.execution_sequence(values))

    def offsets(self, spans: Sequence[Span], values: Sequence[float]) -> tuple[Offset, ...]:
        """Return exact offsets of the order's spans: by the addresses, each as low as those before it allow.

        The solver's addresses are floating point; its decision is which block lies below which.
        """
        offsets: dict[int, Offset] = {}
        columns = enumerate(self.addresses)
        for _, index in sorted((values[column] * step, index) for index, (column, step) in columns):
            span, floor = spans[index], 0
            for low, offset in offsets.items():
                other = spans[low]
                if other.lower < span.upper and span.lower < other.upper and span.size_bytes:
                    floor = max(floor, offset + other.size_bytes)
            offsets[index] = -(-floor // span.alignment) * span.alignment
        return tuple(offsets[index] for index in range(len(spans)))


@dataclass(frozen=True, slots=True)
class _Block:
    """Something with an address.

    Attributes:
        span: its number among the problem's spans.
        size_bytes: positive.
        alignment: of its address.
        producer: the operator that makes it.
        consumers: those that read it; none for a workspace.
        live: columns whose sum at a timestep is 1 if it is alive then.
    """

    span: int
    size_bytes: Bytes
    alignment: int
    producer: OperatorIndex
    consumers: tuple[OperatorIndex, ...]
    live: tuple[TimedColumns, ...]


def joint_program(
    problem: Problem,
    order: Sequence[OperatorIndex],
    offsets: Sequence[Offset],
    techniques: Techniques = ALL_TECHNIQUES,
    deadline: float = float("inf"),
) -> JointProgram:
    """State equation 9.

    Args:
        problem: the graph.
        order: of a known plan, the start.
        offsets: of the known plan, for each span of :func:`~olla_solvers.spans.spans_of`.
        techniques: how to state it.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        The program, with its start set.

    Raises:
        DeadlinePassedError: if the deadline passes.
    """
    flow, operators, arrays = _one_array_a_storage(problem)
    spans = spans_of(problem, order)
    height = height_bytes(spans, offsets)
    unit = unit_bytes(spans)
    model = TimedModel(deadline=deadline)
    buffer = model.column(0, height // unit)
    model.objective, model.start[buffer] = buffer, height // unit
    lifetimes = state_lifetimes(model, flow, techniques)
    number = {operator: position for position, operator in enumerate(operators)}
    lifetimes.set_start(model, flow, [number[operator] for operator in order])
    if techniques.resident_sets:
        resident_sets(model, flow, lifetimes, buffer, unit)
    blocks = _blocks(problem, spans, lifetimes, arrays, number)
    addresses = [
        _address(model, span, offset, height, unit) for span, offset in zip(spans, offsets, strict=True)
    ]
    for block in blocks:
        _below_the_top(model, addresses[block.span], block.size_bytes / unit, buffer)
    for first, other in _pairs(flow, blocks, techniques):
        _apart(model, flow, (first, other), addresses, (spans, offsets, height // unit, unit), techniques)
    return JointProgram(model, unit, lifetimes, operators, tuple(addresses))


def rows_needed(problem: Problem, techniques: Techniques = ALL_TECHNIQUES) -> int:
    """Return about how many rows :func:`joint_program` would need, without stating it.

    Args:
        problem: the graph.
        techniques: how it would be stated.

    Returns:
        At most a few times too many.
    """
    flow, _, _ = _one_array_a_storage(problem)
    blocks = len(flow.arrays) + len(scratching(problem))
    return 3 * windows(flow, techniques).columns + blocks * blocks // 2 * flow.count


def _one_array_a_storage(
    problem: Problem,
) -> tuple[FlowGraph, tuple[OperatorIndex, ...], dict[int, int]]:
    """Return the flow graph with an array for each planned one that is read: each has an address of its own.

    Returns:
        The graph, for each of its operators the problem's, and from a planned array's number to its own.
    """
    order = problem.captured_order
    number = {operator: position for position, operator in enumerate(order)}
    rise = [problem.operators[operator].workspace_bytes for operator in order]
    arrays: list[FlowArray] = []
    numbers: dict[int, int] = {}
    for index, array in enumerate(problem.planned):
        if array.producer is None or not array.size_bytes:
            continue
        rise[number[array.producer]] += array.size_bytes
        if array.consumers:
            numbers[index] = len(arrays)
            readers = tuple(sorted(number[reader] for reader in array.consumers))
            arrays.append(FlowArray(array.size_bytes, number[array.producer], readers))
    edges = ((number[earlier], number[later]) for earlier, later in problem.edges)
    return flow_graph(rise, arrays, edges), order, numbers


def _blocks(
    problem: Problem,
    spans: Sequence[Span],
    lifetimes: Lifetimes,
    arrays: dict[int, int],
    number: dict[OperatorIndex, int],
) -> list[_Block]:
    """Return every planned array and workspace with bytes."""
    blocks = []
    for index, array in enumerate(problem.planned):
        if array.producer is None or not array.size_bytes:
            continue
        producer = number[array.producer]
        readers = tuple(number[reader] for reader in array.consumers)
        live: tuple[TimedColumns, ...] = (lifetimes.runs[producer],)
        if readers:
            live = (lifetimes.creation[arrays[index]], lifetimes.preserved[arrays[index]])
        blocks.append(_Block(index, array.size_bytes, array.alignment, producer, readers, live))
    for position, (operator, scratch) in enumerate(scratching(problem)):
        span = len(problem.planned) + position
        runs = lifetimes.runs[number[operator]]
        blocks.append(
            _Block(span, scratch.workspace_bytes, spans[span].alignment, number[operator], (), (runs,))
        )
    return blocks


def height_bytes(spans: Sequence[Span], offsets: Sequence[Offset]) -> Bytes:
    """Return the end of the topmost span."""
    return max((offset + span.size_bytes for span, offset in zip(spans, offsets, strict=True)), default=0)


def _address(model: LinearModel, span: Span, known: Offset, height: Bytes, unit: Bytes) -> Address:
    """Make an address; in whole alignments if the unit does not imply its alignment."""
    step = unit if unit % span.alignment == 0 else span.alignment
    column = model.column(0, max(0, height - span.size_bytes) / step, integer=step != unit)
    model.start[column] = known / step
    return column, step / unit


def _below_the_top(model: LinearModel, address: Address, size: float, buffer: Column) -> None:
    """State equation 8: every block ends within the buffer."""
    model.require(Expression([address, (buffer, -1)], size), "<=")


def _pairs(
    flow: FlowGraph, blocks: Sequence[_Block], techniques: Techniques
) -> Iterator[tuple[_Block, _Block]]:
    """Yield pairs that may be alive together."""
    for first, other in itertools.combinations(blocks, 2):
        if techniques.precedence and (_precedes(flow, first, other) or _precedes(flow, other, first)):
            continue
        yield first, other


def _precedes(flow: FlowGraph, first: _Block, other: _Block) -> bool:
    """Return True if all that touch the first are ancestors of the other's producer: never alive together."""
    above = flow.ancestors[other.producer]
    return all(above >> operator & 1 for operator in (first.producer, *first.consumers))


def _always_meet(first: _Block, other: _Block) -> bool:
    """Return True if some operator touches both, so that they are alive together whatever the order."""
    return not {first.producer, *first.consumers}.isdisjoint((other.producer, *other.consumers))


def _apart(
    model: LinearModel,
    flow: FlowGraph,
    pair: tuple[_Block, _Block],
    addresses: Sequence[Address],
    known: tuple[Sequence[Span], Sequence[Offset], int, Bytes],
    techniques: Techniques,
) -> None:
    """State equations 6, 7a and 7b for two blocks."""
    spans, offsets, most, unit = known
    first, other = pair
    below, above = model.binary(), model.binary()
    meet = (
        spans[first.span].lower < spans[other.span].upper
        and spans[other.span].lower < spans[first.span].upper
    )
    model.start[below] = float(meet and offsets[first.span] < offsets[other.span])
    model.start[above] = float(meet and offsets[first.span] > offsets[other.span])
    if techniques.precedence and _always_meet(first, other):
        model.require(Expression([(below, 1), (above, 1)]), "==", 1)
    else:
        model.require(Expression([(below, 1), (above, 1)]), "<=", 1)
        for timestep in range(flow.count):
            _ordered_where_both_live(model, pair, timestep, (below, above))
    for column, low, high in ((below, first, other), (above, other, first)):
        row = Expression([addresses[low.span], (column, most)], low.size_bytes / unit)
        row.add(addresses[high.span][0], -addresses[high.span][1])
        model.require(row, "<=", most)


def _ordered_where_both_live(
    model: LinearModel, pair: tuple[_Block, _Block], timestep: int, either: tuple[Column, Column]
) -> None:
    """State equation 6 at one timestep."""
    row = Expression([(column, -1) for column in either], -1)
    for block in pair:
        live = [columns[timestep] for columns in block.live if timestep in columns]
        if not live:
            return
        for column in live:
            row.add(column, 1)
    model.require(row, "<=")
