"""States the integer linear program of ordering: OLLA equation 14, that is equations 1-5 and 13.

The columns and equations 1-5 are those of :mod:`olla_solvers.ilp.order_columns`. An operator's rise stands
for the arrays it creates in equation 13, so that workspaces and unread arrays count at their own timestep.
Sizes are divided by their greatest common divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.graph.flow import FlowGraph
from olla_solvers.ilp.model import Column, Expression, LinearModel
from olla_solvers.ilp.order_columns import Lifetimes, TimedModel, state_lifetimes, windows
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, Techniques
from olla_solvers.problem import Bytes, OperatorIndex


@dataclass(frozen=True)
class OrderProgram:
    """The program and what is needed to read its solutions.

    Attributes:
        model: the linear program; its objective is the peak in units.
        unit_bytes: bytes of one unit.
        lifetimes: its columns for runs and preservation.
    """

    model: LinearModel
    unit_bytes: Bytes
    lifetimes: Lifetimes

    def decode(self, values: Sequence[float]) -> tuple[OperatorIndex, ...]:
        """Return the operators by the timestep at which they run: Function 1, duplicates removed."""
        return self.lifetimes.execution_sequence(values)


def variables_needed(flow: FlowGraph, techniques: Techniques = ALL_TECHNIQUES) -> int:
    """Return the number of columns that :func:`order_program` would make, without making them.

    Args:
        flow: the graph.
        techniques: which of them to use.

    Returns:
        Their number.
    """
    return 1 + windows(flow, techniques).columns


def order_program(
    flow: FlowGraph,
    start: Sequence[OperatorIndex],
    techniques: Techniques = ALL_TECHNIQUES,
    deadline: float = float("inf"),
) -> OrderProgram:
    """State the program.

    Args:
        flow: the graph to order.
        start: a known order: its columns' values are the warm start, and its peak, which no useful
            solution exceeds, is the objective's upper bound.
        techniques: how to state it.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        The program, with its start set.

    Raises:
        DeadlinePassedError: if the deadline passes.
    """
    unit = math.gcd(*flow.rise_bytes, *(array.size_bytes for array in flow.arrays)) or 1
    model = TimedModel(deadline=deadline)
    peak = model.column(0, flow.peak_bytes(start) // unit)
    model.objective = peak
    lifetimes = state_lifetimes(model, flow, techniques)
    resident_sets(model, flow, lifetimes, peak, unit)
    model.start[peak] = flow.peak_bytes(start) // unit
    lifetimes.set_start(model, flow, start)
    return OrderProgram(model, unit, lifetimes)


def resident_sets(
    model: LinearModel, flow: FlowGraph, lifetimes: Lifetimes, peak: Column, unit: Bytes
) -> None:
    """State equation 13: at no timestep is more alive than the peak.

    Args:
        model: to add the rows to.
        flow: the graph.
        lifetimes: its columns in the model.
        peak: the column that bounds what is alive, in units.
        unit: bytes of one unit.
    """
    alive = [Expression([(peak, -1)]) for _ in range(flow.count)]
    for operator, columns in enumerate(lifetimes.runs):
        for timestep, column in columns.items():
            alive[timestep].add(column, flow.rise_bytes[operator] // unit)
    for array, kept in zip(flow.arrays, lifetimes.preserved, strict=True):
        for timestep, column in kept.items():
            alive[timestep].add(column, array.size_bytes // unit)
    for expression in alive:
        model.require(expression, "<=")
