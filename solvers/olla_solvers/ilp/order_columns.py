"""States as columns when operators run and arrays are preserved: OLLA equations 1-5 under 10-12.

One operator runs at a timestep. C[v, t] says that operator v runs, and so creates its arrays, at t; with
:attr:`~olla_solvers.ilp.techniques.Techniques.shared_outputs` it is one column for all of them. P[e, t]
says that array e is preserved at t. If the techniques leave no choice there is no column: the value is
the constant 1, or, outside the timesteps listed, 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from olla_solvers.analysis import Range, timesteps
from olla_solvers.effort.deadline import check_time
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.ilp.model import Column, Expression, LinearModel, Sense
from olla_solvers.ilp.techniques import Techniques
from olla_solvers.problem import OperatorIndex, Timestep

TimedColumns: TypeAlias = Mapping[Timestep, Column | None]
"""A column for each timestep at which something may be 1; None if it surely is."""

ROWS_A_CHECK = 64
"""Rows stated between two checks of the deadline."""


@dataclass
class TimedModel(LinearModel):
    """A model that takes no more rows when its time is over: stating a large one can outlast a limit.

    Attributes:
        deadline: ``time.monotonic()`` from which :meth:`require` raises ``DeadlinePassedError``.
    """

    deadline: float = float("inf")

    def require(self, expression: Expression, sense: Sense, right: float = 0) -> None:
        """Add a row, if there is time.

        Raises:
            DeadlinePassedError: if the deadline has passed.
        """
        if len(self.rows) % ROWS_A_CHECK == 0:
            check_time(self.deadline)
        super().require(expression, sense, right)


@dataclass(frozen=True, slots=True)
class Windows:
    """The timesteps that have columns.

    Attributes:
        runs: for each operator the timesteps at which it may run.
        copies: for each operator how many of its arrays have columns of their own for their creation.
        useful: for each array the timesteps at which it may be preserved.
        surely: for each array those of them at which it is.
    """

    runs: tuple[Range, ...]
    copies: tuple[int, ...]
    useful: tuple[Range, ...]
    surely: tuple[Range, ...]

    @property
    def columns(self) -> int:
        """The number of columns of C and P together."""
        runs = sum(len(_open(span)) * copies for span, copies in zip(self.runs, self.copies, strict=True))
        preserved = sum(_length(useful) for useful in self.useful)
        return runs + preserved - sum(_length(surely) for surely in self.surely)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The columns.

    Attributes:
        created: C, for each operator: one for all its arrays, or one for each.
        preserved: P, for each array.
        creation: for each array its producer's C, or its own.
    """

    created: tuple[tuple[TimedColumns, ...], ...]
    preserved: tuple[TimedColumns, ...]
    creation: tuple[TimedColumns, ...]

    @property
    def runs(self) -> tuple[TimedColumns, ...]:
        """The columns that say when each operator runs."""
        return tuple(copies[0] for copies in self.created)

    def execution_sequence(
        self, values: Sequence[float], *, remove_duplicates: bool = True
    ) -> tuple[OperatorIndex, ...]:
        """Return the operators by the timestep at which their arrays are created: Function 1.

        Args:
            values: of all columns.
            remove_duplicates: name an operator once, even if several arrays of its own have columns. Off:
                as Function 1 collects them, an operator for each such array.

        Returns:
            Operator indices, first to last.
        """
        created: list[tuple[Timestep, OperatorIndex]] = []
        for operator, copies in enumerate(self.created):
            for columns in copies:
                created.append((max(columns, key=lambda t: _value(columns[t], values)), operator))
        sequence = [operator for _, operator in sorted(created)]
        return tuple(dict.fromkeys(sequence) if remove_duplicates else sequence)

    def set_start(self, model: LinearModel, flow: FlowGraph, order: Sequence[OperatorIndex]) -> None:
        """Give every column its value in a known order.

        Args:
            model: holds the columns.
            flow: the graph.
            order: operator indices, first to last.
        """
        timestep = timesteps(order)
        for operator, copies in enumerate(self.created):
            for columns in copies:
                for moment, column in columns.items():
                    if column is not None:
                        model.start[column] = float(moment == timestep[operator])
        for array, kept in zip(flow.arrays, self.preserved, strict=True):
            last = max(timestep[consumer] for consumer in array.consumers)
            for moment, column in kept.items():
                if column is not None:
                    model.start[column] = float(timestep[array.producer] < moment <= last)


def operator_spans(flow: FlowGraph, *, precedence: bool = True) -> tuple[Range, ...]:
    """Return SPAN of equation 10 for each operator.

    Args:
        flow: the graph.
        precedence: by the number of ancestors and descendants, as one operator runs at a timestep; otherwise
            by the longest distances to an input and to an output.

    Returns:
        Half-open ranges of timesteps.
    """
    if precedence:
        return tuple(
            Range(above.bit_count(), flow.count - below.bit_count())
            for above, below in zip(flow.ancestors, flow.descendants, strict=True)
        )
    forward, backward = levels(flow)
    return tuple(Range(early, flow.count - late) for early, late in zip(forward, backward, strict=True))


def levels(flow: FlowGraph) -> tuple[list[int], list[int]]:
    """Return the levelization: each operator's longest distances to an input and to an output, from 0."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(flow.count))
    graph.add_edges_from((u, v) for v, direct in enumerate(flow.predecessors) for u in direct)
    both = []
    for directed in (graph, graph.reverse(copy=False)):
        level = [0] * flow.count
        for distance, generation in enumerate(networkx.topological_generations(directed)):
            for operator in generation:
                level[operator] = distance
        both.append(level)
    return both[0], both[1]


def windows(flow: FlowGraph, techniques: Techniques) -> Windows:
    """Return the timesteps at which equations 10 to 12 leave a choice.

    Args:
        flow: the graph.
        techniques: which of them to use.

    Returns:
        The timesteps of every column.
    """
    spans = operator_spans(flow, precedence=techniques.precedence)
    always, never = Range(0, flow.count), Range(0, 0)
    useful, surely = [], []
    for array in flow.arrays:
        producer = spans[array.producer]
        latest = max(spans[consumer].upper for consumer in array.consumers)
        earliest = max(spans[consumer].lower for consumer in array.consumers)
        useful.append(Range(producer.lower + 1, latest) if techniques.useful_lifetimes else always)
        fixed = techniques.preserved and producer.upper <= earliest
        surely.append(Range(producer.upper, earliest + 1) if fixed else never)
    return Windows(
        spans if techniques.spans else (always,) * flow.count,
        tuple(1 if techniques.shared_outputs else max(1, len(outputs)) for outputs in flow.outputs),
        tuple(useful),
        tuple(surely),
    )


def state_lifetimes(model: LinearModel, flow: FlowGraph, techniques: Techniques) -> Lifetimes:
    """Add the columns, and the rows of equations 1 to 5, to a model.

    Args:
        model: to add to.
        flow: the graph.
        techniques: which of equations 10 to 12, and of the other techniques, to use.

    Returns:
        The columns.
    """
    choices = windows(flow, techniques)
    created = tuple(
        tuple(_run_columns(model, span) for _ in range(copies))
        for span, copies in zip(choices.runs, choices.copies, strict=True)
    )
    creation: list[TimedColumns] = [{} for _ in flow.arrays]
    for operator, outputs in enumerate(flow.outputs):
        for number, index in enumerate(outputs):
            creation[index] = created[operator][number if len(created[operator]) > 1 else 0]
    preserved = tuple(
        {t: None if t in surely else model.binary() for t in range(useful.lower, useful.upper)}
        for useful, surely in zip(choices.useful, choices.surely, strict=True)
    )
    columns = Lifetimes(created, preserved, tuple(creation))
    _created_or_preserved(model, columns)
    _preserved_only_after(model, columns)
    _run_once(model, columns)
    _one_operator_a_timestep(model, columns)
    _inputs_present(model, flow, columns)
    _pure_precedence(model, flow, columns)
    _created_together(model, columns)
    return columns


def _open(span: Range) -> range:
    """Return the timesteps for which a run needs a column: none if there is no choice."""
    return range(span.lower, span.upper) if _length(span) > 1 else range(0)


def _length(span: Range) -> int:
    return max(0, span.upper - span.lower)


def _run_columns(model: LinearModel, span: Range) -> TimedColumns:
    if not _open(span):
        return {span.lower: None}
    return {timestep: model.binary() for timestep in _open(span)}


def _created_or_preserved(model: LinearModel, columns: Lifetimes) -> None:
    """State equation 1: at a timestep an array is created or preserved, not both."""
    for made, kept in zip(columns.creation, columns.preserved, strict=True):
        for timestep, column in kept.items():
            if timestep in made:
                either = Expression()
                either.add(column, 1)
                either.add(made[timestep], 1)
                model.require(either, "<=", 1)


def _preserved_only_after(model: LinearModel, columns: Lifetimes) -> None:
    """State equation 2: what is preserved was created or preserved one timestep before."""
    for made, kept in zip(columns.creation, columns.preserved, strict=True):
        for timestep, column in kept.items():
            since = Expression()
            since.add(column, 1)
            for before in (kept, made):
                if timestep - 1 in before:
                    since.add(before[timestep - 1], -1)
            model.require(since, "<=")


def _all_creations(columns: Lifetimes) -> Iterator[tuple[OperatorIndex, TimedColumns]]:
    for operator, copies in enumerate(columns.created):
        for columns_of_copy in copies:
            yield operator, columns_of_copy


def _run_once(model: LinearModel, columns: Lifetimes) -> None:
    """State equation 3: every array is created, and every operator runs, once."""
    for _, creation in _all_creations(columns):
        once = Expression()
        for column in creation.values():
            once.add(column, 1)
        model.require(once, "==", 1)


def _one_operator_a_timestep(model: LinearModel, columns: Lifetimes) -> None:
    """State that one operator runs at every timestep."""
    running = [Expression() for _ in columns.created]
    for run in columns.runs:
        for timestep, column in run.items():
            running[timestep].add(column, 1)
    for expression in running:
        model.require(expression, "==", 1)


def _inputs_present(model: LinearModel, flow: FlowGraph, columns: Lifetimes) -> None:
    """State equation 4: an array is created only while those that its operator reads are preserved."""
    for operator, creation in _all_creations(columns):
        for index in flow.inputs[operator]:
            kept = columns.preserved[index]
            for timestep, column in creation.items():
                needs = Expression()
                needs.add(column, 1)
                if timestep in kept:
                    needs.add(kept[timestep], -1)
                model.require(needs, "<=")


def _created_together(model: LinearModel, columns: Lifetimes) -> None:
    """State equation 5: an operator creates all its arrays at the same time."""
    for first, *others in columns.created:
        for other in others:
            for timestep in first:
                tied = Expression()
                tied.add(other[timestep], 1)
                tied.add(first[timestep], -1)
                model.require(tied, "==")


def _pure_precedence(model: LinearModel, flow: FlowGraph, columns: Lifetimes) -> None:
    """State edges without an array: what has run by t includes the predecessor by t - 1."""
    carried = {(array.producer, consumer) for array in flow.arrays for consumer in array.consumers}
    runs = columns.runs
    for later, direct in enumerate(flow.predecessors):
        for earlier in direct:
            if (earlier, later) not in carried:
                for timestep in runs[later]:
                    by_now = Expression()
                    for run_at, column in runs[later].items():
                        if run_at <= timestep:
                            by_now.add(column, 1)
                    for run_at, column in runs[earlier].items():
                        if run_at < timestep:
                            by_now.add(column, -1)
                    model.require(by_now, "<=")


def _value(column: Column | None, values: Sequence[float]) -> float:
    return 1.0 if column is None else values[column]
