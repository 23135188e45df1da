"""Finds order and addresses at once, by OLLA's equation 9, for small graphs.

The program (:mod:`olla_solvers.paper.joint_program`) has a row for each pair of arrays and timestep. It is
the referee for the split into equations 14 and 15: its optimum is never below the smallest peak, and above it
just if fragmentation cannot be avoided.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from olla_solvers.analysis import peak_bytes
from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.graph.flow import flow_of
from olla_solvers.ilp import backends
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, Techniques
from olla_solvers.order.greedy import best_order
from olla_solvers.paper.joint_program import height_bytes, joint_program, rows_needed
from olla_solvers.place import place
from olla_solvers.plan import MemoryPlan, Provenance, SolverEffect, SolverReport, SolverStatus, Span
from olla_solvers.problem import Bytes, Offset, OperatorIndex, Problem
from olla_solvers.spans import scratching, spans_of
from olla_solvers.validate import validate

DEFAULT_SECONDS = 30.0
"""Time limit if none is given."""

START_SECONDS = 1.0
"""At most, for placing the arrays of the order that the program starts from."""

MOST_ROWS = 500_000
"""Larger programs are not stated: they find nothing."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A known plan: its order, spans, offsets and buffer, and the method that found the offsets."""

    order: tuple[OperatorIndex, ...]
    spans: tuple[Span, ...]
    offsets: tuple[Offset, ...]
    buffer_bytes: Bytes
    placed_by: str


def joint_plan(
    problem: Problem,
    *,
    solver: str,
    time_limit: float | None = None,
    techniques: Techniques = ALL_TECHNIQUES,
) -> MemoryPlan:
    """Order the operators and place the arrays of a small graph at once, for the smallest buffer.

    Args:
        problem: the graph.
        solver: ``cbc``, ``gurobi`` or ``highs``; the program always runs, started from heuristics.
        time_limit: seconds; None for the default of at most about 30.
        techniques: how the program is stated; contraction and pieces have no part in it.

    Returns:
        The plan, which has passed :func:`~olla_solvers.validate.validate`. ``provenance.place_solver`` is
        the program's report, whose bound no buffer of any order is below.

    Raises:
        SolverUnavailableError: if the solver is unknown, missing or not licensed for the program.
    """
    start = time.monotonic()
    deadline = start + (DEFAULT_SECONDS if time_limit is None else time_limit)
    backends.require(solver)
    bound, known = _heuristic_plan(problem, deadline)
    rows = rows_needed(problem, techniques)
    if rows > MOST_ROWS:
        detail = f"not stated: it would need about {rows} rows, more than {MOST_ROWS}"
        best, report = known, SolverReport(solver, SolverStatus.FAILED, detail=detail)
    else:
        best, report = _solve(problem, known, solver, deadline, techniques)
    plan = _memory_plan(problem, best, known, bound, report, time.monotonic() - start)
    validate(problem, plan)
    return plan


def _heuristic_plan(problem: Problem, deadline: float) -> tuple[Bytes, _Known]:
    """Return the precedence bound, and greedy's order with offsets from a short search."""
    flow, captured = flow_of(problem)
    bound = max(flow.precedence_bytes, default=0)
    candidate = best_order(flow, bound, deadline)
    sequence = tuple(captured[operator] for operator in candidate.order)
    spans = spans_of(problem, sequence)
    seconds = min(START_SECONDS, max(0.0, deadline - time.monotonic()))
    placement = place(spans, solver="none", time_limit=seconds)
    return bound, _Known(sequence, spans, placement.offsets, placement.height_bytes, placement.found_by)


def _solve(
    problem: Problem, known: _Known, solver: str, deadline: float, techniques: Techniques
) -> tuple[_Known, SolverReport]:
    """Run the program; the known plan stays unless the program's buffer is smaller."""
    begin = time.monotonic()
    try:
        program = joint_program(problem, known.order, known.offsets, techniques, deadline)
    except DeadlinePassedError:
        status = SolverStatus.TIME_LIMIT_WITH_INCUMBENT
        return known, SolverReport(solver, status, detail="not stated: there was no time")
    solution = backends.solve(program.model, solver, time_limit=max(0.1, deadline - time.monotonic()))
    best = known
    if solution.values is not None:
        sequence = program.order(solution.values)
        spans = spans_of(problem, sequence)
        offsets = program.offsets(spans, solution.values)
        height = height_bytes(spans, offsets)
        if height < known.buffer_bytes and problem.is_executable(sequence):
            best = _Known(sequence, spans, offsets, height, f"joint:{solver}")
    value = best.buffer_bytes // program.unit_bytes
    proven = backends.proven_units(solution, value)
    effect = SolverEffect.CONFIRMED if proven == value else SolverEffect.NONE
    return best, SolverReport(
        solver=solver,
        status=backends.report_status(solution.outcome, proven=proven == value),
        effect=SolverEffect.IMPROVED if best is not known else effect,
        objective_bytes=best.buffer_bytes,
        bound_bytes=None if proven is None else proven * program.unit_bytes,
        variables=len(program.model.lower),
        constraints=len(program.model.rows),
        seconds=time.monotonic() - begin,
        detail=solution.detail,
    )


def _memory_plan(
    problem: Problem, best: _Known, known: _Known, bound: Bytes, report: SolverReport, seconds: float
) -> MemoryPlan:
    peak = peak_bytes(problem, best.order)
    order_method = "greedy" if best is known else best.placed_by
    proven = report.bound_bytes is not None and report.bound_bytes >= best.buffer_bytes
    names = [array.name for array in problem.planned]
    workspaces = [operator.name for _, operator in scratching(problem)]
    return MemoryPlan(
        order=tuple(problem.operators[operator].name for operator in best.order),
        offsets=dict(zip(names, best.offsets[: len(names)], strict=True)),
        workspace_offsets=dict(zip(workspaces, best.offsets[len(names) :], strict=True)),
        buffer_bytes=best.buffer_bytes,
        peak_bytes=peak,
        lower_bound_bytes=min(bound, peak),
        provenance=Provenance(
            order_found_by=order_method,
            order_proved_by="precedence bound" if bound >= peak else None,
            order_solver=replace(report, objective_bytes=None, bound_bytes=None),
            place_found_by=best.placed_by,
            place_proved_by=f"joint:{report.solver}" if proven else None,
            place_solver=report,
        ),
        timings={"joint": seconds},
    )
