"""Runs the integer program of placement, with any solver or a named one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp import backends
from olla_solvers.ilp.place_program import is_free_of_collisions, overlapping_pairs, place_program
from olla_solvers.plan import SolverEffect, SolverReport, SolverStatus, Span
from olla_solvers.problem import Bytes, Offset
from olla_solvers.spans import height_bytes

MOST_PAIRS = 50_000
"""Larger programs are not stated even for a named solver; nor are programs that no licence takes, if the
placement is at its bound already."""

MOST_AUTO_PAIRS = 400
"""Without a named solver, programs with more pairs alive together are not tried: they find nothing."""


def may_help(spans: Sequence[Span]) -> bool:
    """Return True if the program is small enough to be tried without being asked for."""
    return len(overlapping_pairs(spans)) <= MOST_AUTO_PAIRS


def solve_with_any(
    spans: Sequence[Span], known: Sequence[Offset], bound: Bytes, deadline: float
) -> tuple[Sequence[Offset], SolverReport]:
    """Run the program with the first solver that takes it; arguments as for :func:`solve_with`."""
    for solver in backends.SOLVERS:
        if not backends.is_installed(solver):
            continue
        try:
            return solve_with(spans, known, bound, solver, deadline)
        except SolverUnavailableError:
            continue
    return known, SolverReport("none")


def solve_with(
    spans: Sequence[Span], known: Sequence[Offset], bound: Bytes, solver: str, deadline: float
) -> tuple[Sequence[Offset], SolverReport]:
    """Run the program from a known placement, which stays unless the program's is lower.

    Args:
        spans: checked rectangles.
        known: an offset for each span.
        bound: no placement is lower.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        deadline: on the monotonic clock.

    Returns:
        The lower placement, and the solver's report, whose effect is ``IMPROVED`` if that is the program's.

    Raises:
        SolverUnavailableError: if the solver's licence does not take the program.
    """
    begin = time.monotonic()
    pairs = len(overlapping_pairs(spans))
    height = height_bytes(spans, known)
    too_large = pairs > MOST_PAIRS or not backends.may_take(solver, pairs + len(spans) + 1, 2 * pairs)
    if pairs > MOST_PAIRS or (too_large and height == bound):
        status = SolverStatus.NOT_RUN if height == bound else SolverStatus.FAILED
        return known, SolverReport(solver, status, detail=f"not stated: {pairs} pairs are alive together")
    program = place_program(spans, known, bound)
    solution = backends.solve(program.model, solver, time_limit=max(0.1, deadline - time.monotonic()))
    best = known
    if solution.values is not None:
        offsets = program.decode(spans, solution.values)
        if height_bytes(spans, offsets) < height and is_free_of_collisions(spans, offsets):
            best, height = offsets, height_bytes(spans, offsets)
    value = height // program.unit_bytes
    proven = backends.proven_units(solution, value)
    effect = SolverEffect.CONFIRMED if proven == value else SolverEffect.NONE
    return best, SolverReport(
        solver=solver,
        status=backends.report_status(solution.outcome, proven=proven == value),
        effect=SolverEffect.IMPROVED if best is not known else effect,
        objective_bytes=height,
        bound_bytes=None if proven is None else proven * program.unit_bytes,
        variables=len(program.model.lower),
        constraints=len(program.model.rows),
        seconds=time.monotonic() - begin,
        detail=solution.detail,
    )
