"""Orders a graph by the integer program, piece by piece of the contracted graph, the costliest first.

The smallest peak of the graph is the largest of its pieces', so a bound proven for any piece holds for
the whole, and a piece whose known order needs no more than that bound need not be solved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from olla_solvers.effort.deadline import DeadlinePassedError, check_time
from olla_solvers.graph.contract import Contracted, contract, unchanged
from olla_solvers.graph.flow import Candidate, FlowGraph
from olla_solvers.graph.split import Piece, split, undivided
from olla_solvers.ilp import backends
from olla_solvers.ilp.order_program import OrderProgram, order_program, variables_needed
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, Techniques
from olla_solvers.plan import SolverEffect, SolverReport, SolverStatus
from olla_solvers.problem import Bytes, OperatorIndex

Heuristic: TypeAlias = Callable[[FlowGraph, float], Candidate]
"""Orders a graph until a deadline."""

MOST_VARIABLES = 150_000
"""Larger programs are not stated: writing them down alone would outlast any sensible limit."""

WRITING = 1.5
"""Time that is kept for writing a program for the solver, in that of stating it."""

ENDING_SECONDS = 0.3
"""Kept for ending a solver that overruns, and for reading what it left."""

START_SHARE = 0.2
"""Part of the time that contraction and the pieces' known orders may take; the rest is the program's."""


@dataclass
class Solved:
    """The result of the program's runs.

    Attributes:
        orders: for each piece, its best order.
        bound_bytes: what the solver proved no order of the whole can beat; None if nothing.
        status: of the last run.
        detail: the solver's own words in the last run.
        variables: columns of all programs together.
        constraints: rows of all programs together.
        seconds: wall-clock time of all runs, stating the programs included.
    """

    orders: list[tuple[OperatorIndex, ...]]
    bound_bytes: Bytes | None = None
    status: SolverStatus = SolverStatus.NOT_RUN
    detail: str = ""
    variables: int = 0
    constraints: int = 0
    seconds: float = 0.0


def improve(
    flow: FlowGraph,
    known: Candidate,
    heuristic: Heuristic,
    solver: str,
    deadline: float,
    techniques: Techniques = ALL_TECHNIQUES,
    narrow: Callable[[FlowGraph], Contracted] = unchanged,
) -> tuple[Candidate, SolverReport]:
    """Improve a known order of a graph by a named solver, and prove what it can.

    Args:
        flow: the graph.
        known: an order of it.
        heuristic: orders a piece, until a deadline; its orders are the programs' starts.
        solver: one of :data:`olla_solvers.ilp.backends.SOLVERS`.
        deadline: ``time.monotonic()`` at which to stop.
        techniques: how the program is stated.
        narrow: adds edges to the contracted graph.

    Returns:
        The best order, and the solver's report.

    Raises:
        SolverUnavailableError: if the solver is missing or its licence does not take a program.
    """
    now = time.monotonic()
    early = now + START_SHARE * max(0.0, deadline - now)
    contracted = contract(flow, early) if techniques.contract else unchanged(flow)
    narrowed = narrow(contracted.flow)
    parts = tuple(contracted.parts[operator] for (operator,) in narrowed.parts)
    contracted = replace(contracted, flow=narrowed.flow, parts=parts)
    pieces = split(contracted.flow) if techniques.pieces else undivided(contracted.flow)
    if not pieces:
        # All operators run first or last; the costliest of them stands for the graph in the program.
        pieces = (Piece(FlowGraph((contracted.floor_bytes,), (), ((),)), (None,)),)
    starts = [heuristic(piece.flow, early) for piece in pieces]
    costliest = max(starts, key=lambda start: start.peak_bytes)

    def joined(orders: Sequence[Sequence[OperatorIndex]], rule: str) -> Candidate:
        inner = [
            operator for piece, order in zip(pieces, orders, strict=True) for operator in piece.expand(order)
        ]
        expanded = contracted.expand(inner)
        return Candidate(expanded, flow.peak_bytes(expanded), rule)

    known = better(known, joined([start.order for start in starts], f"{costliest.rule}, contracted"))
    solved = solve_pieces(pieces, [start.order for start in starts], solver, deadline, techniques)
    best = better(known, joined(solved.orders, f"ilp:{solver}"))
    return best, _report(solved, solver, known, best, contracted.floor_bytes)


def better(known: Candidate, other: Candidate) -> Candidate:
    """Return the candidate with the smaller peak; the known one if they are equal."""
    return other if other.peak_bytes < known.peak_bytes else known


def solve_pieces(
    pieces: Sequence[Piece],
    orders: Sequence[tuple[OperatorIndex, ...]],
    solver: str,
    deadline: float,
    techniques: Techniques = ALL_TECHNIQUES,
) -> Solved:
    """Solve pieces until the bound covers all others or time is over.

    Args:
        pieces: the graph's parts.
        orders: for each piece a known order.
        solver: one of :data:`olla_solvers.ilp.backends.SOLVERS`.
        deadline: ``time.monotonic()`` at which to stop.
        techniques: how to state the programs.

    Returns:
        Orders no worse than the known ones, and what was proven.

    Raises:
        SolverUnavailableError: if the solver is missing or its licence does not take a program.
    """
    begin = time.monotonic()
    solved = Solved(list(orders))
    peaks = [piece.flow.peak_bytes(order) for piece, order in zip(pieces, orders, strict=True)]
    for index in sorted(range(len(pieces)), key=lambda i: -peaks[i]):
        if solved.status not in (SolverStatus.NOT_RUN, SolverStatus.OPTIMAL):
            break
        if solved.bound_bytes is not None and peaks[index] <= solved.bound_bytes:
            break
        program = _stated(solved, pieces[index], index, solver, deadline, techniques)
        if program is not None:
            _solve_piece(solved, program, pieces[index], index, solver, deadline)
    solved.seconds = time.monotonic() - begin
    return solved


def _stated(
    solved: Solved, piece: Piece, index: int, solver: str, deadline: float, techniques: Techniques
) -> OrderProgram | None:
    """Return the program of a piece, if it is small enough and there is time to state and to write it."""
    needed = variables_needed(piece.flow, techniques)
    if needed > MOST_VARIABLES:
        backends.require(solver)
        solved.status = SolverStatus.FAILED
        solved.detail = f"not stated: it would need {needed} variables, more than {MOST_VARIABLES}"
        return None
    start = time.monotonic()
    try:
        program = order_program(piece.flow, solved.orders[index], techniques, deadline)
        # Writing it for the solver takes at most about as long again, and cannot be interrupted.
        check_time(deadline - WRITING * (time.monotonic() - start))
    except DeadlinePassedError:
        solved.status = SolverStatus.TIME_LIMIT_WITH_INCUMBENT
        solved.detail = f"not given to {solver}: stating its {needed} variables took all the time there was"
        return None
    solved.variables += len(program.model.lower)
    solved.constraints += len(program.model.rows)
    return program


def _solve_piece(
    solved: Solved, program: OrderProgram, piece: Piece, index: int, solver: str, deadline: float
) -> None:
    """Run one program: take its order if it is better, and its bound."""
    flow, known = piece.flow, solved.orders[index]
    left = max(0.1, deadline - ENDING_SECONDS - time.monotonic())
    solution = backends.solve(program.model, solver, time_limit=left)
    if solution.values is not None:
        order = program.decode(solution.values)
        if flow.is_executable(order) and flow.peak_bytes(order) < flow.peak_bytes(known):
            solved.orders[index] = order
    value = flow.peak_bytes(solved.orders[index]) // program.unit_bytes
    bound = backends.proven_units(solution, value)
    if bound is not None:
        solved.bound_bytes = max(solved.bound_bytes or 0, bound * program.unit_bytes)
    solved.status = backends.report_status(solution.outcome, proven=bound == value)
    solved.detail = solution.detail


def _report(
    solved: Solved, solver: str, known: Candidate, best: Candidate, floor_bytes: Bytes
) -> SolverReport:
    """Return what the solver did, its bound lifted to what the operators outside the program need."""
    bound = None if solved.bound_bytes is None else max(solved.bound_bytes, floor_bytes)
    effect = SolverEffect.NONE
    if best.peak_bytes < known.peak_bytes:
        effect = SolverEffect.IMPROVED
    elif bound is not None and bound >= best.peak_bytes:
        effect = SolverEffect.CONFIRMED
    return SolverReport(
        solver=solver,
        status=solved.status,
        effect=effect,
        objective_bytes=best.peak_bytes,
        bound_bytes=None if bound is None else min(bound, best.peak_bytes),
        variables=solved.variables,
        constraints=solved.constraints,
        seconds=solved.seconds,
        detail=solved.detail,
    )
