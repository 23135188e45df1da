"""Runs the integer program of placement, with every solver or one that is named."""

from __future__ import annotations

import time
from collections.abc import Sequence

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp import backends
from olla_solvers.ilp.place_program import is_free_of_collisions, overlapping_pairs, place_program
from olla_solvers.place.candidate import Found
from olla_solvers.plan import SolverEffect, SolverReport, SolverStatus, Span
from olla_solvers.problem import Bytes

MOST_PAIRS = 50_000
"""Larger programs are not stated even for a named solver, and those that no licence takes only where they
could still help: where the placement is above its bound."""

MOST_AUTO_PAIRS = 400
"""Without a named solver, programs with more pairs alive together are not tried: they find nothing."""


def may_help(spans: Sequence[Span]) -> bool:
    """Whether the program is small enough to be tried without being asked for."""
    return len(overlapping_pairs(spans)) <= MOST_AUTO_PAIRS


def solve_with_any(
    spans: Sequence[Span], known: Found, bound: Bytes, deadline: float
) -> tuple[Found, SolverReport]:
    """Run the program with the first solver that takes it; arguments as for :func:`solve_with`."""
    for solver in backends.available_solvers():
        try:
            return solve_with(spans, known, bound, solver, deadline)
        except SolverUnavailableError:
            continue
    return known, SolverReport("none")


def solve_with(
    spans: Sequence[Span], known: Found, bound: Bytes, solver: str, deadline: float
) -> tuple[Found, SolverReport]:
    """Run the program from a known placement, which stays unless the program's is lower.

    Args:
        spans: checked rectangles.
        known: where they can lie.
        bound: no placement is lower.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        deadline: on the monotonic clock.

    Returns:
        The lower placement and what the solver did.

    Raises:
        SolverUnavailableError: when the solver's licence does not take the program.
    """
    begin = time.monotonic()
    pairs = len(overlapping_pairs(spans))
    too_large = pairs > MOST_PAIRS or not backends.may_take(solver, pairs + len(spans) + 1, 2 * pairs)
    if pairs > MOST_PAIRS or (too_large and known.height_bytes == bound):
        status = SolverStatus.NOT_RUN if known.height_bytes == bound else SolverStatus.FAILED
        return known, SolverReport(solver, status, detail=f"not stated: {pairs} pairs are alive together")
    program = place_program(spans, known.offsets, bound)
    remaining = max(0.1, deadline - time.monotonic())
    solution = backends.solve(program.model, solver, time_limit=remaining)
    best = known
    if solution.values is not None:
        found = Found.of(spans, program.decode(spans, solution.values), f"mip:{solver}")
        if found.height_bytes < known.height_bytes and is_free_of_collisions(spans, found.offsets):
            best = found
    value = best.height_bytes // program.unit_bytes
    proven = backends.proven_units(solution, value)
    effect = SolverEffect.CONFIRMED if proven == value else SolverEffect.NONE
    return best, SolverReport(
        solver=solver,
        status=backends.report_status(solution.outcome, proven=proven == value),
        effect=SolverEffect.IMPROVED if best is not known else effect,
        objective_bytes=best.height_bytes,
        bound_bytes=None if proven is None else proven * program.unit_bytes,
        variables=len(program.model.lower),
        constraints=len(program.model.rows),
        seconds=time.monotonic() - begin,
        detail=solution.detail,
    )
