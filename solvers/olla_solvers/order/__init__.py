"""Finds an execution order with a small peak and proves what no order can beat.

Without a named solver a portfolio runs: greedy list scheduling, bounds, the exact search, and the integer
program only where it may help (:mod:`olla_solvers.order.portfolio`). A named solver always gets the
integer program of OLLA equation 14 on the contracted graph's pieces, started from the greedy orders,
which are never lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from olla_solvers.analysis import peak_bytes, timesteps
from olla_solvers.baselines.inductor import HEURISTICS
from olla_solvers.graph.contract import Contracted, contract, unchanged
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.graph.split import Piece, split, undivided
from olla_solvers.ilp import backends
from olla_solvers.ilp.order_pieces import Refined, refine
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, LITERAL, Techniques
from olla_solvers.order.greedy import Found, best_order, best_piece_order, free_first
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.paper.early_updates import with_early_updates
from olla_solvers.plan import Schedule, SolverEffect, SolverReport
from olla_solvers.problem import Bytes, OperatorIndex, Problem
from olla_solvers.progress import ProgressLog

__all__ = ["ALL_TECHNIQUES", "LITERAL", "Techniques", "order", "order_in_stages"]

DEFAULT_SECONDS = 30.0
"""Time limit where none is given."""

SECONDS_WITHOUT_PROGRAM = 5.0
"""Time limit of the heuristics and the search where none is given and no program is wanted."""


START_SHARE = 0.2
"""Part of the time that a named solver's start may take; the rest is the program's."""


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


def order(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float | None = None,
    techniques: Techniques = ALL_TECHNIQUES,
) -> Schedule:
    """Order a problem's operators for the smallest peak.

    Args:
        problem: the graph.
        solver: ``auto`` (heuristics, bounds and the exact search; an integer program only where it may
            help), ``cbc``, ``gurobi``, ``highs`` (the program really runs, without the search's order or
            bound) or ``none`` (no integer program).
        time_limit: seconds; None for at most about 30, and about 5 with ``none``.
        techniques: how a named solver's program is stated.

    Returns:
        The best order found, its peak, and a proven bound. Never worse than the captured order.

    Raises:
        SolverUnavailableError: when the named solver is unknown, not installed, or not licensed for a
            program of this size.
    """
    start = time.monotonic()
    if time_limit is None:
        time_limit = SECONDS_WITHOUT_PROGRAM if solver == "none" else DEFAULT_SECONDS
    if solver not in ("auto", "none"):
        backends.require(solver)
        return _by_program(problem, solver, start, start + time_limit, techniques)
    return _by_portfolio(problem, solver, start, start + time_limit)[0]


def order_in_stages(
    problem: Problem, *, time_limit: float = DEFAULT_SECONDS
) -> tuple[Schedule, Mapping[str, float]]:
    """Order as :func:`order` does with ``auto``, and say where the time went.

    Args:
        problem: the graph.
        time_limit: seconds.

    Returns:
        The order, and wall-clock seconds for each method that ran.
    """
    start = time.monotonic()
    return _by_portfolio(problem, "auto", start, start + time_limit)


def _by_portfolio(
    problem: Problem, solver: str, start: float, deadline: float
) -> tuple[Schedule, Mapping[str, float]]:
    """By all methods in turn; the integer program only with ``auto``."""
    flow, captured = flow_of(problem)
    reading = time.monotonic() - start
    # Joining and checking the order takes about as long as reading the graph did.
    log = ProgressLog(start)
    portfolio = Portfolio(flow, deadline - min(reading, (deadline - start) / 10), log=log)
    portfolio.run_short()
    begin = time.monotonic()
    if portfolio.best.peak_bytes > portfolio.bound_bytes:
        for sequence, rule in _marks(problem, flow, captured):
            portfolio.offer(sequence, rule)
    heuristics = time.monotonic() - begin
    portfolio.run_long(program=solver == "auto")
    report = SolverReport("none")
    if portfolio.refined is not None:
        name, refined, known = portfolio.refined
        report = _report(refined, name, known, portfolio.best, 0)
    bound = min(portfolio.bound_bytes, portfolio.best.peak_bytes)
    proved_by = portfolio.bound_by if bound == portfolio.best.peak_bytes else None
    best = [captured[each] for each in portfolio.best.order]
    schedule = _schedule(problem, best, portfolio.best.rule, (bound, proved_by), report, log, start)
    return schedule, {"reading": reading, **portfolio.seconds, "plain heuristics": heuristics}


def _marks(
    problem: Problem, flow: FlowGraph, captured: Sequence[OperatorIndex]
) -> Iterator[tuple[Sequence[OperatorIndex], str]]:
    """Orders that none may be worse than: TorchInductor's heuristics and plain list schedules.

    All are linear in the graph's edges, logarithms aside, so they are asked whatever the time limit, but
    only where the order is not proven.
    """
    for by_net in (True, False):
        yield free_first(flow, by_net=by_net), "free first"
    position = timesteps(captured)
    for name, heuristic in HEURISTICS.items():
        yield [position[each] for each in heuristic(problem)], f"inductor:{name}"


def _by_program(
    problem: Problem, solver: str, start: float, deadline: float, techniques: Techniques
) -> Schedule:
    """By the named solver's integer program, started from the greedy orders."""
    flow, captured = flow_of(problem)
    bound = max(flow.precedence_bytes, default=0)
    log = ProgressLog(start)
    known = best_order(flow, bound, deadline, log)
    if known.peak_bytes > bound:
        for sequence, rule in _marks(problem, flow, captured):
            known = _better(flow, known, Found(tuple(sequence), 0, rule))
    now = time.monotonic()
    parts = _parts(flow, bound, now + START_SHARE * max(0.0, deadline - now), techniques)
    known = _better(flow, known, Found(parts.expand([each.order for each in parts.known]), 0, _rule(parts)))
    log.note(known.peak_bytes, bound, known.rule)
    refined = refine(parts.pieces, parts.known, solver, deadline, techniques)
    if techniques.early_updates and not techniques.safe_anchors:
        # What holds for the narrowed graph need not hold for this one.
        refined.bound_bytes = None
    found = _better(flow, known, Found(parts.expand(refined.orders), 0, f"ilp:{solver}"))
    report = _report(refined, solver, known, found, parts.contracted.floor_bytes)
    proved_by = None
    if report.bound_bytes is not None and report.bound_bytes >= found.peak_bytes:
        proved_by = f"ilp:{solver}"
    if bound == found.peak_bytes:
        proved_by = "precedence bound"
    bound = max(bound, report.bound_bytes or 0)
    log.note(found.peak_bytes, min(bound, found.peak_bytes), f"ilp:{solver}")
    best = [captured[each] for each in found.order]
    return _schedule(problem, best, found.rule, (bound, proved_by), report, log, start)


def _parts(flow: FlowGraph, bound: Bytes, deadline: float, techniques: Techniques) -> _Parts:
    contracted = contract(flow, deadline) if techniques.contract else unchanged(flow)
    if techniques.early_updates:
        early = with_early_updates(contracted.flow, safe=techniques.safe_anchors)
        contracted = replace(
            contracted,
            flow=early.flow,
            parts=tuple(contracted.parts[each] for (each,) in early.parts),
        )
    pieces = split(contracted.flow) if techniques.pieces else undivided(contracted.flow)
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
    proof: tuple[Bytes, str | None],
    report: SolverReport,
    log: ProgressLog,
    start: float,
) -> Schedule:
    """An order with its peak, computed anew from the problem."""
    return Schedule(
        order=tuple(sequence),
        peak_bytes=peak_bytes(problem, sequence),
        lower_bound_bytes=proof[0],
        found_by=found_by,
        proved_by=proof[1],
        solver=report,
        seconds=time.monotonic() - start,
        progress=log.improvements,
    )
