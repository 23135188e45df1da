"""From a problem to a checked plan: order, then place, then validate.

OLLA §4.4 splits the joint program in the same two: an order with the smallest peak first, then addresses.
If the order's arrays do not fit together well, another order of the same peak may be taken instead.
"""

from __future__ import annotations

import time
from dataclasses import replace

from olla_solvers.analysis import peak_bytes
from olla_solvers.ilp import backends
from olla_solvers.order import order
from olla_solvers.order.alternatives import orders_of_peak
from olla_solvers.place import place
from olla_solvers.place.skyline import longest_lifetime, skyline
from olla_solvers.plan import MemoryPlan, Provenance, Schedule
from olla_solvers.problem import Bytes, OperatorIndex, Problem
from olla_solvers.spans import height_bytes, scratching, spans_of
from olla_solvers.validate import validate


def make_plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit: float | None = None,
    schedule: Schedule | None = None,
) -> MemoryPlan:
    """Order a problem's operators, place its arrays and workspaces, and check the result.

    Args:
        problem: the graph.
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` or ``none``, for both stages.
        time_limit: seconds for each stage; None for the default of at most about 30.
        schedule: an order found before; None to find one.

    Returns:
        The plan, which has passed :func:`~olla_solvers.validate.validate`.

    Raises:
        SolverUnavailableError: if the named solver is unknown, missing or not licensed.
        OptionError: if the time limit is none.
        ValidationError: if a given schedule does not fit the problem.
    """
    backends.check_options(solver, time_limit)
    is_given = schedule is not None
    if schedule is None:
        schedule = order(problem, solver=solver, time_limit=time_limit)
    plan = place_schedule(problem, schedule, solver=solver, time_limit=time_limit, keeps_order=is_given)
    validate(problem, plan)
    return plan


def place_schedule(
    problem: Problem,
    schedule: Schedule,
    *,
    solver: str = "auto",
    time_limit: float | None = None,
    keeps_order: bool = False,
) -> MemoryPlan:
    """Place the arrays and workspaces of an order, or of another order with the same peak.

    Args:
        problem: the graph.
        schedule: the order, from :func:`~olla_solvers.order.order`.
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` or ``none``. A named solver keeps the order: it is a
            referee of what it is to place.
        time_limit: seconds; None for the default of at most about 30.
        keeps_order: True if no other order may be taken.

    Returns:
        The plan, not validated yet.
    """
    start = time.monotonic()
    if not keeps_order and solver in ("auto", "none"):
        schedule = _easier_to_place(problem, schedule)
    spans = spans_of(problem, schedule.order)
    placement = place(spans, solver=solver, time_limit=time_limit)
    arrays = len(problem.planned)
    names = [array.name for array in problem.planned]
    workspaces = [operator.name for _, operator in scratching(problem)]
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
    )


def _easier_to_place(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the same order, or another of its peak that the simplest heuristic places without a gap."""
    if _fits(problem, schedule.order, schedule.peak_bytes):
        return schedule
    for rule, other in orders_of_peak(problem, schedule.peak_bytes):
        if _fits(problem, other, schedule.peak_bytes):
            # An order that was cut short by its time limit may even have a larger peak.
            return replace(schedule, order=other, peak_bytes=peak_bytes(problem, other), found_by=rule)
    return schedule


def _fits(problem: Problem, sequence: tuple[OperatorIndex, ...], peak_bytes: Bytes) -> bool:
    """Return True if the skyline places an order's arrays within the peak."""
    spans = spans_of(problem, sequence)
    return height_bytes(spans, skyline(spans, longest_lifetime)) <= peak_bytes
