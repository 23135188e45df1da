"""The integer linear program of ordering: OLLA equation 14, that is equations 1-5 and 13.

One operator runs at a timestep. C[v, t] says that operator v runs, and so creates all its arrays, at t;
sharing it among the arrays of one operator is equation 5. P[e, t] says that array e is preserved at t.
Columns exist only where equations 10 and 11 leave them open, and are constants where equation 12 fixes
them. An operator's rise stands for the arrays it creates in equation 13, so that workspaces and unread
arrays count at their own timestep. Sizes are divided by their greatest common divisor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from olla_solvers.analysis import Range, timesteps
from olla_solvers.model import Column, Expression, LinearModel
from olla_solvers.order.flow import FlowGraph
from olla_solvers.problem import Bytes, OperatorIndex, Timestep

TimedColumns = Mapping[Timestep, Column | None]
"""A column for each timestep at which something may be 1; None where it surely is."""


@dataclass(frozen=True)
class OrderProgram:
    """The program and what is needed to read its solutions.

    Attributes:
        model: the linear program; its objective is the peak in units.
        unit_bytes: bytes of one unit.
        runs: C, for each operator.
        preserved: P, for each array.
    """

    model: LinearModel
    unit_bytes: Bytes
    runs: tuple[TimedColumns, ...]
    preserved: tuple[TimedColumns, ...]

    def decode(self, values: Sequence[float]) -> tuple[OperatorIndex, ...]:
        """Function 1: the operators by the timestep at which they run; each is there once."""
        order: list[tuple[Timestep, OperatorIndex]] = []
        for operator, columns in enumerate(self.runs):
            chosen = max(columns, key=lambda t: _value(columns[t], values))
            order.append((chosen, operator))
        return tuple(operator for _, operator in sorted(order))


def variables_needed(flow: FlowGraph) -> int:
    """Columns that :func:`order_program` would make, without making them."""
    spans = operator_spans(flow)
    runs = sum(len(_open(span)) for span in spans)
    return 1 + runs + sum(_preserved_open(flow, spans, index) for index in range(len(flow.arrays)))


def order_program(flow: FlowGraph, start: Sequence[OperatorIndex]) -> OrderProgram:
    """State the program.

    Args:
        flow: the graph to order.
        start: a known order: its columns' values are the warm start, and its peak, which no useful
            solution exceeds, is the objective's upper bound.

    Returns:
        The program, with its start set.
    """
    spans = operator_spans(flow)
    unit = math.gcd(*flow.rise_bytes, *(array.size_bytes for array in flow.arrays)) or 1
    model = LinearModel()
    peak = model.column(0, flow.peak_bytes(start) // unit)
    model.objective = peak
    runs = tuple(_run_columns(model, span) for span in spans)
    preserved = tuple(_preserved_columns(model, flow, spans, index) for index in range(len(flow.arrays)))
    _created_or_preserved(model, flow, runs, preserved)
    _preserved_only_after(model, flow, runs, preserved)
    _run_once(model, runs)
    _one_operator_a_timestep(model, runs)
    _inputs_present(model, flow, runs, preserved)
    _pure_precedence(model, flow, runs)
    _peak(model, flow, runs, preserved, peak, unit)
    program = OrderProgram(model, unit, runs, preserved)
    _set_start(program, flow, start, peak)
    return program


def operator_spans(flow: FlowGraph) -> tuple[Range, ...]:
    """SPAN of equation 10 for each operator, with one operator a timestep."""
    return tuple(
        Range(above.bit_count(), flow.count - below.bit_count())
        for above, below in zip(flow.ancestors, flow.descendants, strict=True)
    )


def _open(span: Range) -> range:
    """Timesteps for which a run needs a column: none when there is no choice."""
    return range(span.lower, span.upper) if span.upper - span.lower > 1 else range(0)


def _preserved_ranges(flow: FlowGraph, spans: Sequence[Range], index: int) -> tuple[Range, Range]:
    """Where an array may be preserved (equation 11, after its creation) and where it must (equation 12)."""
    array = flow.arrays[index]
    producer = spans[array.producer]
    useful = Range(producer.lower + 1, max(spans[consumer].upper for consumer in array.consumers))
    surely = Range(producer.upper, max(spans[consumer].lower for consumer in array.consumers) + 1)
    return useful, surely


def _preserved_open(flow: FlowGraph, spans: Sequence[Range], index: int) -> int:
    useful, surely = _preserved_ranges(flow, spans, index)
    return useful.upper - useful.lower - max(0, surely.upper - surely.lower)


def _run_columns(model: LinearModel, span: Range) -> TimedColumns:
    if not _open(span):
        return {span.lower: None}
    return {timestep: model.binary() for timestep in _open(span)}


def _preserved_columns(
    model: LinearModel, flow: FlowGraph, spans: Sequence[Range], index: int
) -> TimedColumns:
    useful, surely = _preserved_ranges(flow, spans, index)
    return {t: None if t in surely else model.binary() for t in range(useful.lower, useful.upper)}


def _created_or_preserved(
    model: LinearModel, flow: FlowGraph, runs: Sequence[TimedColumns], preserved: Sequence[TimedColumns]
) -> None:
    """Equation 1: at a timestep an array is created or preserved, not both."""
    for array, kept in zip(flow.arrays, preserved, strict=True):
        for timestep, column in kept.items():
            if timestep in runs[array.producer]:
                either = Expression()
                either.add(column, 1)
                either.add(runs[array.producer][timestep], 1)
                model.require(either, "<=", 1)


def _preserved_only_after(
    model: LinearModel, flow: FlowGraph, runs: Sequence[TimedColumns], preserved: Sequence[TimedColumns]
) -> None:
    """Equation 2: what is preserved was created or preserved one timestep before."""
    for array, kept in zip(flow.arrays, preserved, strict=True):
        for timestep, column in kept.items():
            since = Expression()
            since.add(column, 1)
            for before in (kept, runs[array.producer]):
                if timestep - 1 in before:
                    since.add(before[timestep - 1], -1)
            model.require(since, "<=")


def _run_once(model: LinearModel, runs: Sequence[TimedColumns]) -> None:
    """Equation 3: every operator runs once."""
    for columns in runs:
        once = Expression()
        for column in columns.values():
            once.add(column, 1)
        model.require(once, "==", 1)


def _one_operator_a_timestep(model: LinearModel, runs: Sequence[TimedColumns]) -> None:
    """One operator runs at every timestep."""
    at: list[Expression] = [Expression() for _ in runs]
    for columns in runs:
        for timestep, column in columns.items():
            at[timestep].add(column, 1)
    for expression in at:
        model.require(expression, "==", 1)


def _inputs_present(
    model: LinearModel, flow: FlowGraph, runs: Sequence[TimedColumns], preserved: Sequence[TimedColumns]
) -> None:
    """Equation 4: an operator runs only where the arrays it reads are preserved."""
    for array, kept in zip(flow.arrays, preserved, strict=True):
        for consumer in array.consumers:
            for timestep, column in runs[consumer].items():
                needs = Expression()
                needs.add(column, 1)
                needs.add(kept[timestep], -1)
                model.require(needs, "<=")


def _pure_precedence(model: LinearModel, flow: FlowGraph, runs: Sequence[TimedColumns]) -> None:
    """An edge without an array: what has run by t includes the predecessor by t - 1."""
    carried = {(array.producer, consumer) for array in flow.arrays for consumer in array.consumers}
    for later, direct in enumerate(flow.predecessors):
        for earlier in direct:
            if (earlier, later) in carried:
                continue
            for timestep in runs[later]:
                by_now = Expression()
                for run_at, column in runs[later].items():
                    if run_at <= timestep:
                        by_now.add(column, 1)
                for run_at, column in runs[earlier].items():
                    if run_at < timestep:
                        by_now.add(column, -1)
                model.require(by_now, "<=")


def _peak(
    model: LinearModel,
    flow: FlowGraph,
    runs: Sequence[TimedColumns],
    preserved: Sequence[TimedColumns],
    peak: Column,
    unit: Bytes,
) -> None:
    """Equation 13: at no timestep is more alive than the peak."""
    alive = [Expression([(peak, -1)]) for _ in range(flow.count)]
    for operator, columns in enumerate(runs):
        for timestep, column in columns.items():
            alive[timestep].add(column, flow.rise_bytes[operator] // unit)
    for array, kept in zip(flow.arrays, preserved, strict=True):
        for timestep, column in kept.items():
            alive[timestep].add(column, array.size_bytes // unit)
    for expression in alive:
        model.require(expression, "<=")


def _set_start(program: OrderProgram, flow: FlowGraph, order: Sequence[OperatorIndex], peak: Column) -> None:
    start = program.model.start
    start[peak] = flow.peak_bytes(order) // program.unit_bytes
    timestep = timesteps(order)
    for operator, columns in enumerate(program.runs):
        for at, column in columns.items():
            if column is not None:
                start[column] = float(at == timestep[operator])
    for array, kept in zip(flow.arrays, program.preserved, strict=True):
        last = max(timestep[consumer] for consumer in array.consumers)
        for at, column in kept.items():
            if column is not None:
                start[column] = float(timestep[array.producer] < at <= last)


def _value(column: Column | None, values: Sequence[float]) -> float:
    return 1.0 if column is None else values[column]
