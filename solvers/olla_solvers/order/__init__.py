"""Finds an execution order with a small peak and proves what no order can beat.

First greedy list scheduling, on the graph as it is and contracted; where its best order meets the
precedence bound, that proves it. Otherwise, or where a solver is named, the integer program of OLLA
equation 14 on the contracted graph's pieces, started from the greedy orders, which are never lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from olla_solvers import backends
from olla_solvers.analysis import peak_bytes
from olla_solvers.errors import SolverUnavailableError
from olla_solvers.order.contract import Contracted, contract
from olla_solvers.order.flow import FlowGraph, flow_of
from olla_solvers.order.greedy import Found, best_order, best_piece_order
from olla_solvers.order.ilp import variables_needed
from olla_solvers.order.refine import Refined, refine
from olla_solvers.order.split import Piece, split
from olla_solvers.plan import Schedule, SolverEffect, SolverReport
from olla_solvers.problem import Bytes, OperatorIndex, Problem

__all__ = ["order"]

DEFAULT_SECONDS = 30.0
"""Time limit of the integer program where none is given."""

MOST_AUTO_VARIABLES = 20_000
"""Without a named solver, larger integer programs are not tried."""


@dataclass(frozen=True)
class _Parts:
    """A contracted graph's pieces, each with the order that greedy found."""

    contracted: Contracted
    pieces: tuple[Piece, ...]
    known: tuple[Found, ...]

    def expand(self, orders: Sequence[Sequence[OperatorIndex]]) -> tuple[OperatorIndex, ...]:
        """The original graph's order from one of each piece."""
        joined = [each for piece, one in zip(self.pieces, orders, strict=True) for each in piece.expand(one)]
        return self.contracted.expand(joined)


def order(problem: Problem, *, solver: str = "auto", time_limit: float | None = None) -> Schedule:
    """Order a problem's operators for the smallest peak.

    Args:
        problem: the graph.
        solver: ``auto`` (an integer program only where it may help), ``cbc``, ``gurobi``, ``highs`` (the
            program really runs) or ``none``.
        time_limit: seconds; None for at most about 30.

    Returns:
        The best order found, its peak, and a proven bound. Never worse than the captured order.

    Raises:
        SolverUnavailableError: when the named solver is unknown, not installed, or not licensed for a
            program of this size.
    """
    start = time.monotonic()
    deadline = start + (DEFAULT_SECONDS if time_limit is None else time_limit)
    if solver not in ("auto", "none"):
        backends.require(solver)
    flow, captured = flow_of(problem)
    bound = max(flow.precedence_bytes, default=0)
    found = best_order(flow, bound, deadline)
    report = SolverReport("none")
    if found.peak_bytes > bound or solver not in ("auto", "none"):
        parts = _parts(flow, bound, deadline)
        found = _better(
            flow, found, Found(parts.expand([each.order for each in parts.known]), 0, _rule(parts))
        )
        known = found
        for candidate in _solvers(solver, parts, known.peak_bytes > bound):
            try:
                refined = refine(parts.pieces, parts.known, candidate, deadline)
            except SolverUnavailableError:
                if solver != "auto":
                    raise
                continue
            found = _better(flow, found, Found(parts.expand(refined.orders), 0, f"ilp:{candidate}"))
            report = _report(refined, candidate, known, found, parts.contracted.floor_bytes)
            break
    return _schedule(problem, [captured[each] for each in found.order], found.rule, bound, report, start)


def _parts(flow: FlowGraph, bound: Bytes, deadline: float) -> _Parts:
    contracted = contract(flow)
    pieces = split(contracted.flow)
    if not pieces:
        # All operators run first or last; the costliest of them stands for the graph in the program.
        pieces = (Piece(FlowGraph((contracted.floor_bytes,), (), ((),)), (None,)),)
    known = tuple(best_piece_order(piece.flow, bound, deadline) for piece in pieces)
    return _Parts(contracted, pieces, known)


def _rule(parts: _Parts) -> str:
    """The rule that ordered the costliest piece."""
    return f"{max(parts.known, key=lambda found: found.peak_bytes).rule}, contracted"


def _better(flow: FlowGraph, best: Found, other: Found) -> Found:
    other = replace(other, peak_bytes=flow.peak_bytes(other.order))
    return other if other.peak_bytes < best.peak_bytes else best


def _solvers(solver: str, parts: _Parts, gap: bool) -> tuple[str, ...]:
    """The solvers to try in turn: the named one, or with ``auto`` those that may take the program."""
    if solver == "none":
        return ()
    if solver != "auto":
        return (solver,)
    size = max(variables_needed(piece.flow) for piece in parts.pieces)
    if not gap or size > MOST_AUTO_VARIABLES:
        return ()
    return tuple(each for each in backends.available_solvers() if backends.may_take(each, size, size))


def _report(refined: Refined, solver: str, known: Found, found: Found, floor: Bytes) -> SolverReport:
    """What the solver did, its bound lifted to what the operators outside the program need."""
    bound = None if refined.bound_bytes is None else max(refined.bound_bytes, floor)
    effect = SolverEffect.NONE
    if found.peak_bytes < known.peak_bytes:
        effect = SolverEffect.IMPROVED
    elif bound is not None and bound >= found.peak_bytes:
        effect = SolverEffect.CONFIRMED
    return SolverReport(
        solver=solver,
        status=refined.status,
        effect=effect,
        objective_bytes=found.peak_bytes,
        bound_bytes=None if bound is None else min(bound, found.peak_bytes),
        variables=refined.variables,
        constraints=refined.constraints,
        seconds=refined.seconds,
        detail=refined.detail,
    )


def _schedule(
    problem: Problem,
    sequence: Sequence[OperatorIndex],
    found_by: str,
    bound: Bytes,
    report: SolverReport,
    start: float,
) -> Schedule:
    peak = peak_bytes(problem, sequence)
    proved_by = None
    if report.bound_bytes is not None and report.bound_bytes >= peak:
        proved_by = f"ilp:{report.solver}"
    if bound == peak:
        proved_by = "precedence bound"
    return Schedule(
        order=tuple(sequence),
        peak_bytes=peak,
        lower_bound_bytes=max(bound, report.bound_bytes or 0),
        found_by=found_by,
        proved_by=proved_by,
        solver=report,
        seconds=time.monotonic() - start,
    )
