"""Runs the ordering program on the pieces of a contracted graph, the costliest first.

The smallest peak of the graph is the largest of its pieces', so a bound proven for any piece holds for
the whole, and a piece whose known order needs no more than that bound need not be solved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.deadline import DeadlinePassedError, check_time
from olla_solvers.graph.split import Piece
from olla_solvers.ilp import backends
from olla_solvers.ilp.order_program import OrderProgram, order_program, variables_needed
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, Techniques
from olla_solvers.order.greedy import Found
from olla_solvers.plan import SolverStatus
from olla_solvers.problem import Bytes, OperatorIndex

MOST_VARIABLES = 150_000
"""Larger programs are not stated: writing them down alone would outlast any sensible limit."""


WRITING = 1.5
"""Time that is kept for writing a program for the solver, in that of stating it."""

ENDING_SECONDS = 0.3
"""Kept for ending a solver that overruns, and for reading what it left."""


@dataclass
class Refined:
    """What the program's runs achieved.

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


def refine(
    pieces: Sequence[Piece],
    known: Sequence[Found],
    solver: str,
    deadline: float,
    techniques: Techniques = ALL_TECHNIQUES,
) -> Refined:
    """Solve pieces until the bound covers all others or time is over.

    Args:
        pieces: the graph's parts.
        known: for each piece a known order.
        solver: one of :data:`olla_solvers.ilp.backends.SOLVERS`.
        deadline: ``time.monotonic()`` at which to stop.
        techniques: how to state the programs.

    Returns:
        Orders no worse than the known ones, and what was proven.

    Raises:
        SolverUnavailableError: when the solver is missing or its licence does not take a program.
    """
    begin = time.monotonic()
    refined = Refined([found.order for found in known])
    for index in sorted(range(len(pieces)), key=lambda i: -known[i].peak_bytes):
        if refined.status not in (SolverStatus.NOT_RUN, SolverStatus.OPTIMAL):
            break
        if refined.bound_bytes is not None and known[index].peak_bytes <= refined.bound_bytes:
            break
        program = _stated(refined, pieces[index], index, solver, deadline, techniques)
        if program is not None:
            _solve_piece(refined, program, pieces[index], index, solver, deadline)
    refined.seconds = time.monotonic() - begin
    return refined


def _stated(
    refined: Refined, piece: Piece, index: int, solver: str, deadline: float, techniques: Techniques
) -> OrderProgram | None:
    """The program of a piece, if it is small enough and there is time to state and to write it."""
    needed = variables_needed(piece.flow, techniques)
    if needed > MOST_VARIABLES:
        backends.require(solver)
        refined.status = SolverStatus.FAILED
        refined.detail = f"not stated: it would need {needed} variables, more than {MOST_VARIABLES}"
        return None
    start = time.monotonic()
    try:
        program = order_program(piece.flow, refined.orders[index], techniques, deadline)
        # Writing it for the solver takes at most about as long again, and cannot be interrupted.
        check_time(deadline - WRITING * (time.monotonic() - start))
    except DeadlinePassedError:
        refined.status = SolverStatus.TIME_LIMIT_WITH_INCUMBENT
        refined.detail = f"not given to {solver}: stating its {needed} variables took all the time there was"
        return None
    refined.variables += len(program.model.lower)
    refined.constraints += len(program.model.rows)
    return program


def _solve_piece(
    refined: Refined, program: OrderProgram, piece: Piece, index: int, solver: str, deadline: float
) -> None:
    """Run one program: take its order where it is better, and its bound."""
    flow, known = piece.flow, refined.orders[index]
    left = max(0.1, deadline - ENDING_SECONDS - time.monotonic())
    solution = backends.solve(program.model, solver, time_limit=left)
    if solution.values is not None:
        found = program.decode(solution.values)
        if _is_executable(piece, found) and flow.peak_bytes(found) < flow.peak_bytes(known):
            refined.orders[index] = found
    value = flow.peak_bytes(refined.orders[index]) // program.unit_bytes
    bound = backends.proven_units(solution, value)
    if bound is not None:
        refined.bound_bytes = max(refined.bound_bytes or 0, bound * program.unit_bytes)
    refined.status = backends.report_status(solution.outcome, proven=bound == value)
    refined.detail = solution.detail


def _is_executable(piece: Piece, order: Sequence[OperatorIndex]) -> bool:
    done = 0
    for operator in order:
        if any(not done >> each & 1 for each in piece.flow.predecessors[operator]):
            return False
        done |= 1 << operator
    return True
