"""Finds an execution order with a small peak and proves what no order can beat.

By default a portfolio runs: greedy list scheduling, bounds, and the exact search
(:mod:`olla_solvers.order.portfolio`), in this process for a first second, which settles nearly all training
steps. If enough can still be gained (:mod:`olla_solvers.effort.patience`), it goes on in a process of its
own, whose states may take gigabytes. A named solver always gets the integer program of OLLA equation 14 on
the contracted graph's pieces (:mod:`olla_solvers.ilp.order_pieces`), started from greedy orders, which are
never lost, and without the search's order or bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from olla_solvers.analysis import peak_bytes, timesteps
from olla_solvers.effort import apart
from olla_solvers.effort.patience import Patience
from olla_solvers.effort.progress import Observer, ProgressLog
from olla_solvers.graph.flow import Candidate, FlowGraph, flow_of
from olla_solvers.ilp import backends
from olla_solvers.ilp.order_pieces import Heuristic, better, improve
from olla_solvers.order.greedy import best_order, free_first_orders
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.plan import Schedule, SolverReport
from olla_solvers.problem import OperatorIndex, Problem

Improve: TypeAlias = Callable[[FlowGraph, Candidate, Heuristic, str, float], tuple[Candidate, SolverReport]]
"""Has a named solver improve an order: the type of :func:`~olla_solvers.ilp.order_pieces.improve`."""


def order(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float | None = None,
    start: Sequence[str] | None = None,
    observer: Observer | None = None,
) -> Schedule:
    """Order a problem's operators for the smallest peak.

    Args:
        problem: the graph.
        solver: ``auto`` or ``none`` (heuristics, bounds and the exact search), or ``cbc``, ``gurobi`` or
            ``highs`` (the integer program really runs, without the search's order or bound).
        time_limit: seconds, for a proof; None for as long as enough can be gained, see
            :mod:`olla_solvers.effort.patience`.
        start: the operators' names in an order known from a similar problem, as one candidate; ignored if
            it is no order of this one.
        observer: hears of each better order or bound while ordering goes on.

    Returns:
        The best order found, its peak, and a proven bound. Never worse than the captured order.

    Raises:
        SolverUnavailableError: if the named solver is unknown, not installed, or not licensed for a
            program of this size.
    """
    return order_patiently(problem, Patience.of(time_limit), solver=solver, start=start, observer=observer)


def order_quickly(
    problem: Problem, seconds: float = math.inf, *, start: Sequence[str] | None = None
) -> Schedule:
    """Order a problem's operators in less than a second, to compare it with others.

    Args:
        problem: the graph.
        seconds: a limit by the clock, too.
        start: as for :func:`order`.

    Returns:
        The best order found, its peak, and a proven bound.
    """
    patience = Patience.quick()
    deadline = min(patience.deadline, time.monotonic() + seconds)
    return order_patiently(problem, replace(patience, deadline=deadline), start=start)


def order_patiently(
    problem: Problem,
    patience: Patience,
    *,
    solver: str = "auto",
    start: Sequence[str] | None = None,
    observer: Observer | None = None,
) -> Schedule:
    """Order for as long as patience lasts; arguments, result and errors as for :func:`order`."""
    if solver not in ("auto", "none"):
        return order_by_solver(problem, solver, patience.seconds(), observer=observer)
    begin = time.monotonic()
    flow, captured = flow_of(problem)
    # Joining and checking the order takes about as long as reading the graph did.
    reading = min(time.monotonic() - begin, patience.seconds() / 10)
    patience = replace(patience, deadline=patience.deadline - reading)
    log = ProgressLog(begin, observer=observer)
    known = None if start is None else _known(problem, flow, captured, start)
    portfolio = Portfolio(flow, patience.first_second_only(), log=log, known=known)
    portfolio.run()
    schedule = _schedule(problem, captured, portfolio, log)
    if not patience.lasts(schedule.peak_bytes, schedule.lower_bound_bytes):
        return schedule
    if patience.seconds() < apart.LEAST_SECONDS:
        return schedule
    arguments = (problem, schedule, portfolio.bound_by, patience, patience.processor_seconds())

    def note(better: Schedule) -> None:
        log.note(better.peak_bytes, better.lower_bound_bytes, better.found_by)

    on_answer = None if observer is None else note
    better_schedule = apart.last_answer(go_on, arguments, patience.seconds(), on_answer)
    return replace(better_schedule or schedule, seconds=time.monotonic() - begin)


def go_on(
    problem: Problem,
    schedule: Schedule,
    bound_by: str,
    patience: Patience,
    processor_seconds: float,
    offer: apart.Offer,
) -> None:
    """Improve an order until patience is over; what a process of its own runs.

    Args:
        problem: the graph.
        schedule: an order and a bound.
        bound_by: the method that proved the bound.
        patience: how long to go on.
        processor_seconds: what is left of its processor time.
        offer: takes each better order or bound.
    """
    flow, captured = flow_of(problem)
    position = timesteps(captured)
    sequence = tuple(position[operator] for operator in schedule.order)
    known = Candidate(sequence, schedule.peak_bytes, schedule.found_by)
    log = ProgressLog(time.monotonic() - schedule.seconds, earlier=schedule.progress)

    def on_gain(portfolio: Portfolio) -> None:
        offer(_schedule(problem, captured, portfolio, log))

    patience = patience.handed_over(processor_seconds)
    portfolio = Portfolio(flow, patience, log=log, known=known, on_gain=on_gain)
    portfolio.prove(schedule.lower_bound_bytes, bound_by)
    portfolio.run()


def _known(
    problem: Problem, flow: FlowGraph, captured: Sequence[OperatorIndex], start: Sequence[str]
) -> Candidate | None:
    """Return an order given by names as a candidate; None if it is no order of the problem."""
    index = {operator.name: number for number, operator in enumerate(problem.operators)}
    sequence = [index[name] for name in start if name in index]
    if len(sequence) != len(start) or not problem.is_executable(sequence):
        return None
    position = timesteps(captured)
    order = tuple(position[operator] for operator in sequence)
    return Candidate(order, flow.peak_bytes(order), "earlier plan")


def _schedule(
    problem: Problem, captured: Sequence[OperatorIndex], portfolio: Portfolio, log: ProgressLog
) -> Schedule:
    """Return what a portfolio has found so far."""
    best = portfolio.best
    bound = min(portfolio.bound_bytes, best.peak_bytes)
    sequence = tuple(captured[operator] for operator in best.order)
    return Schedule(
        order=sequence,
        peak_bytes=peak_bytes(problem, sequence),
        lower_bound_bytes=bound,
        found_by=best.rule,
        proved_by=portfolio.bound_by if bound == best.peak_bytes else None,
        seconds=log.seconds(),
        progress=log.improvements,
    )


def order_by_solver(
    problem: Problem,
    solver: str,
    time_limit: float | None = None,
    improve: Improve = improve,
    observer: Observer | None = None,
) -> Schedule:
    """Order by the named solver's integer program, started from the greedy orders.

    Args:
        problem: the graph.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        time_limit: seconds; None for the default.
        improve: how the program is stated and solved.
        observer: as for :func:`order`.

    Returns:
        As :func:`order`.

    Raises:
        SolverUnavailableError: as :func:`order`.
    """
    start = time.monotonic()
    backends.require(solver)
    deadline = Patience.of(time_limit).deadline
    flow, captured = flow_of(problem)
    bound = max(flow.precedence_bytes, default=0)
    log = ProgressLog(start, observer=observer)
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
