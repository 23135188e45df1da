"""Finds an execution order with a small peak and proves what no order can beat.

By default a portfolio runs: greedy list scheduling, bounds, and the exact search
(:mod:`olla_solvers.order.portfolio`). A named solver always gets the integer program of OLLA equation 14 on
the contracted graph's pieces (:mod:`olla_solvers.ilp.order_pieces`), started from greedy orders, which are
never lost, and without the search's order or bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from olla_solvers.analysis import peak_bytes
from olla_solvers.graph.flow import Candidate, FlowGraph, flow_of
from olla_solvers.ilp import backends
from olla_solvers.ilp.order_pieces import Heuristic, better, improve
from olla_solvers.order.greedy import best_order, free_first_orders
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.plan import Schedule, SolverReport
from olla_solvers.problem import Problem
from olla_solvers.progress import ProgressLog

DEFAULT_SECONDS = 30.0
"""Time limit if none is given."""

SECONDS_WITHOUT_SOLVER = 5.0
"""Time limit if none is given and no solver is wanted."""

Improve: TypeAlias = Callable[[FlowGraph, Candidate, Heuristic, str, float], tuple[Candidate, SolverReport]]
"""Has a named solver improve an order: the type of :func:`~olla_solvers.ilp.order_pieces.improve`."""


def order(problem: Problem, *, solver: str = "auto", time_limit: float | None = None) -> Schedule:
    """Order a problem's operators for the smallest peak.

    Args:
        problem: the graph.
        solver: ``auto`` or ``none`` (heuristics, bounds and the exact search), or ``cbc``, ``gurobi`` or
            ``highs`` (the integer program really runs, without the search's order or bound).
        time_limit: seconds; None for at most about 30, and about 5 with ``none``.

    Returns:
        The best order found, its peak, and a proven bound. Never worse than the captured order.

    Raises:
        SolverUnavailableError: if the named solver is unknown, not installed, or not licensed for a
            program of this size.
    """
    if solver not in ("auto", "none"):
        return order_by_solver(problem, solver, time_limit)
    start = time.monotonic()
    if time_limit is None:
        time_limit = SECONDS_WITHOUT_SOLVER if solver == "none" else DEFAULT_SECONDS
    flow, captured = flow_of(problem)
    # Joining and checking the order takes about as long as reading the graph did.
    reading = min(time.monotonic() - start, time_limit / 10)
    log = ProgressLog(start)
    portfolio = Portfolio(flow, start + time_limit - reading, log=log)
    portfolio.run()
    best = portfolio.best
    bound = min(portfolio.bound_bytes, best.peak_bytes)
    sequence = tuple(captured[operator] for operator in best.order)
    return Schedule(
        order=sequence,
        peak_bytes=peak_bytes(problem, sequence),
        lower_bound_bytes=bound,
        found_by=best.rule,
        proved_by=portfolio.bound_by if bound == best.peak_bytes else None,
        seconds=time.monotonic() - start,
        progress=log.improvements,
    )


def order_by_solver(
    problem: Problem, solver: str, time_limit: float | None = None, improve: Improve = improve
) -> Schedule:
    """Order by the named solver's integer program, started from the greedy orders.

    Args:
        problem: the graph.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        time_limit: seconds; None for at most about 30.
        improve: how the program is stated and solved.

    Returns:
        As :func:`order`.

    Raises:
        SolverUnavailableError: as :func:`order`.
    """
    start = time.monotonic()
    backends.require(solver)
    deadline = start + (DEFAULT_SECONDS if time_limit is None else time_limit)
    flow, captured = flow_of(problem)
    bound = max(flow.precedence_bytes, default=0)
    log = ProgressLog(start)
    known = best_order(flow, bound, deadline, log)
    for candidate in free_first_orders(flow) if known.peak_bytes > bound else ():
        known = better(known, candidate)
    log.note(known.peak_bytes, bound, known.rule)

    def heuristic(piece: FlowGraph, deadline: float) -> Candidate:
        return best_order(piece, bound, deadline)

    best, report = improve(flow, known, heuristic, solver, deadline)
    proved_by = None
    if report.bound_bytes is not None and report.bound_bytes >= best.peak_bytes:
        proved_by = f"ilp:{solver}"
    if bound == best.peak_bytes:
        proved_by = "precedence bound"
    bound = max(bound, report.bound_bytes or 0)
    log.note(best.peak_bytes, min(bound, best.peak_bytes), f"ilp:{solver}")
    sequence = tuple(captured[operator] for operator in best.order)
    return Schedule(
        order=sequence,
        peak_bytes=peak_bytes(problem, sequence),
        lower_bound_bytes=bound,
        found_by=best.rule,
        proved_by=proved_by,
        solver=report,
        seconds=time.monotonic() - start,
        progress=log.improvements,
    )
