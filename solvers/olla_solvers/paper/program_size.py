"""Counts the columns and rows of the ordering program without stating it: exact, for graphs of any size.

Goes through the same equations as :mod:`olla_solvers.ilp.order_columns`, but only asks for each row if
it would hold a column: rows of constants are left out of programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from olla_solvers.analysis import Range
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.ilp.order_columns import Windows, windows
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, Techniques


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """Columns and rows of a program."""

    variables: int
    constraints: int


def program_size(flow: FlowGraph, techniques: Techniques = ALL_TECHNIQUES) -> ProgramSize:
    """Return the size of :func:`~olla_solvers.ilp.order_program.order_program`'s model.

    Args:
        flow: the graph to order.
        techniques: how the program would be stated.

    Returns:
        Its variables and constraints.
    """
    choices = windows(flow, techniques)
    once = sum(copies for run, copies in zip(choices.runs, choices.copies, strict=True) if _is_open(run))
    together = sum(
        (copies - 1) * (run.upper - run.lower)
        for run, copies in zip(choices.runs, choices.copies, strict=True)
        if _is_open(run)
    )
    rows = once + together + _busy_timesteps(choices) + flow.count
    rows += sum(_lifetime_rows(flow, choices, index) for index in range(len(flow.arrays)))
    return ProgramSize(1 + choices.columns, rows + _precedence_rows(flow, choices))


def _is_open(run: Range) -> bool:
    return run.upper - run.lower > 1


def _busy_timesteps(choices: Windows) -> int:
    """Return the number of rows of one operator a timestep."""
    busy: set[int] = set()
    for run in choices.runs:
        if _is_open(run):
            busy.update(range(run.lower, run.upper))
    return len(busy)


def _lifetime_rows(flow: FlowGraph, choices: Windows, index: int) -> int:
    """Return the number of rows of equations 1, 2 and 4 for an array."""
    array, useful, surely = flow.arrays[index], choices.useful[index], choices.surely[index]
    made = choices.runs[array.producer]
    kept = {t for t in range(useful.lower, useful.upper) if t not in surely}
    creating = set(range(made.lower, made.upper)) if _is_open(made) else set()
    rows = sum(1 for t in range(useful.lower, useful.upper) if t in made and (t in kept or t in creating))
    rows += sum(
        1 for t in range(useful.lower, useful.upper) if t in kept or t - 1 in kept or t - 1 in creating
    )
    for consumer in array.consumers:
        run = choices.runs[consumer]
        needed = run.upper - run.lower if _is_open(run) else int(run.lower in kept)
        rows += choices.copies[consumer] * needed
    return rows


def _precedence_rows(flow: FlowGraph, choices: Windows) -> int:
    """Return the number of rows of edges without an array."""
    carried = {(array.producer, consumer) for array in flow.arrays for consumer in array.consumers}
    rows = 0
    for later, direct in enumerate(flow.predecessors):
        for earlier in direct:
            if (earlier, later) not in carried:
                run, before = choices.runs[later], choices.runs[earlier]
                if _is_open(run):
                    rows += run.upper - run.lower
                elif _is_open(before) and before.lower < run.lower:
                    rows += 1
    return rows
