"""From a problem to a checked plan: order, then place, then validate.

OLLA §4.4 splits the joint program in the same two: an order with the smallest peak first, then addresses.
If the order's arrays do not fit together well, another order of the same peak may be taken instead.
One time limit covers all of it; without one, effort follows what can still be gained
(:mod:`olla_solvers.effort.patience`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from olla_solvers.analysis import peak_bytes
from olla_solvers.effort.freed_memory import return_freed_memory
from olla_solvers.effort.patience import Patience
from olla_solvers.effort.progress import Improvement, Observer
from olla_solvers.ilp import backends
from olla_solvers.order import order_patiently
from olla_solvers.order.alternatives import orders_of_peak
from olla_solvers.place import place_patiently
from olla_solvers.place.skyline import longest_lifetime, skyline
from olla_solvers.plan import MemoryPlan, Provenance, Schedule
from olla_solvers.problem import Bytes, OperatorIndex, Problem
from olla_solvers.spans import height_bytes, host_spans_of, scratching, spans_of
from olla_solvers.validate import validate

ORDER_SHARE = 0.65
"""Of the time limit, what ordering may take; placing has all that ordering leaves."""

StageObserver: TypeAlias = Callable[[str, Improvement], None]
"""Hears of each improvement while planning goes on, with its stage: ``order`` or ``place``."""


def make_plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float | None = None,
    schedule: Schedule | None = None,
    start: Sequence[str] | None = None,
    enough_bytes: Bytes = 0,
    observer: StageObserver | None = None,
) -> MemoryPlan:
    """Order a problem's operators, place its arrays and workspaces, and check the result.

    Args:
        problem: the graph.
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` or ``none``, for both stages.
        time_limit: seconds for both stages together, for a proof; None for as long as enough can be gained,
            see :mod:`olla_solvers.effort.patience`.
        schedule: an order found before, which is kept; None to find one.
        start: the operators' names in an order known from a similar problem, to begin from.
        enough_bytes: of a buffer, below which nothing is gained.
        observer: hears of each improvement while planning goes on.

    Returns:
        The plan, which has passed :func:`~olla_solvers.validate.validate`. Arrays on the host are placed in a
        buffer of theirs.

    Raises:
        SolverUnavailableError: if the named solver is unknown, missing or not licensed.
        OptionError: if the time limit is none.
        ValidationError: if a given schedule does not fit the problem.
    """
    backends.check_options(solver, time_limit)
    named = solver in backends.SOLVERS
    patience = replace(Patience.of(time_limit, insists=named), enough_bytes=enough_bytes)
    keeps_order = named or schedule is not None
    if schedule is None:
        part, observe = patience.part(ORDER_SHARE), _of_stage("order", observer)
        schedule = order_patiently(problem, part, solver=solver, start=start, observer=observe)
    observe = _of_stage("place", observer)
    plan = _place(problem, schedule, patience, solver, observe, keeps_order=keeps_order)
    validate(problem, plan)
    return_freed_memory()
    return plan


def _of_stage(stage: str, observer: StageObserver | None) -> Observer | None:
    return None if observer is None else partial(observer, stage)


def _place(
    problem: Problem,
    schedule: Schedule,
    patience: Patience,
    solver: str,
    observer: Observer | None,
    *,
    keeps_order: bool,
) -> MemoryPlan:
    """Place the arrays and workspaces of an order, or of another order with the same peak.

    Args:
        problem: the graph.
        schedule: the order.
        patience: how long to go on.
        solver: of the integer program. A named one is a referee of what it is to place.
        observer: hears of each lower placement.
        keeps_order: True if no other order may be taken.

    Returns:
        The plan, not validated yet.
    """
    start = time.monotonic()
    if not keeps_order:
        schedule = _easier_to_place(problem, schedule, patience)
    spans = spans_of(problem, schedule.order)
    placement = place_patiently(spans, patience, solver=solver, observer=observer)
    arrays = len(problem.planned)
    names = [array.name for array in problem.planned]
    workspaces = [operator.name for _, operator in scratching(problem)]
    on_host = place_patiently(host_spans_of(problem, schedule.order), patience, solver="none")
    return MemoryPlan(
        order=tuple(problem.operators[operator].name for operator in schedule.order),
        offsets=dict(zip(names, placement.offsets[:arrays], strict=True)),
        workspace_offsets=dict(zip(workspaces, placement.offsets[arrays:], strict=True)),
        buffer_bytes=placement.height_bytes,
        peak_bytes=schedule.peak_bytes,
        lower_bound_bytes=schedule.lower_bound_bytes,
        provenance=Provenance(
            order_found_by=schedule.found_by,
            order_proved_by=schedule.proved_by,
            order_solver=schedule.solver,
            place_found_by=placement.found_by,
            place_proved_by=placement.proved_by,
            place_solver=placement.solver,
        ),
        timings={"order": schedule.seconds, "place": time.monotonic() - start},
        progress={"order": schedule.progress, "place": placement.progress},
        host_offsets={
            array.name: offset for array, offset in zip(problem.on_host, on_host.offsets, strict=True)
        },
        host_bytes=on_host.height_bytes,
    )


def _easier_to_place(problem: Problem, schedule: Schedule, patience: Patience) -> Schedule:
    """Return the same order, or another of its peak that the simplest heuristic places without a gap."""
    height = _height_bytes(problem, schedule.order)
    if not patience.lasts(height, schedule.peak_bytes):
        return schedule
    for rule, other in orders_of_peak(problem, schedule.peak_bytes):
        if _height_bytes(problem, other) <= schedule.peak_bytes:
            # An order that was cut short by its time limit may even have a larger peak.
            return replace(schedule, order=other, peak_bytes=peak_bytes(problem, other), found_by=rule)
        if not patience.lasts(height, schedule.peak_bytes):
            break
    return schedule


def _height_bytes(problem: Problem, sequence: tuple[OperatorIndex, ...]) -> Bytes:
    """Return the height at which the simplest skyline places an order's arrays."""
    spans = spans_of(problem, sequence)
    return height_bytes(spans, skyline(spans, longest_lifetime))
