"""Orders by the integer program as OLLA's section 4 states it, with or without each of its techniques."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from olla_solvers.graph.contract import Contracted, unchanged
from olla_solvers.graph.flow import Candidate, FlowGraph
from olla_solvers.ilp.order_pieces import Heuristic, improve
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, Techniques
from olla_solvers.order import order_by_solver
from olla_solvers.paper.early_updates import with_early_updates
from olla_solvers.plan import Schedule, SolverEffect, SolverReport
from olla_solvers.problem import Problem


class Anchors(enum.Enum):
    """Which control edges make weight updates run early (:mod:`olla_solvers.paper.early_updates`).

    ``SAFE`` ones provably keep the smallest peak. With ``PAPER``, the paper's own, the program's bound holds
    for the narrowed graph alone and is not reported.
    """

    NONE = "none"
    SAFE = "safe"
    PAPER = "paper"


def order_with_techniques(
    problem: Problem,
    *,
    solver: str,
    time_limit: float | None = None,
    techniques: Techniques = ALL_TECHNIQUES,
    anchors: Anchors = Anchors.SAFE,
) -> Schedule:
    """Order a problem's operators by the integer program, stated in a chosen way.

    Args:
        problem: the graph.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        time_limit: seconds; None for the default.
        techniques: how the program is stated.
        anchors: which control edges are added to the graph.

    Returns:
        As :func:`olla_solvers.order.order`.

    Raises:
        SolverUnavailableError: if the solver is unknown, missing or not licensed for the program.
    """
    narrow: Callable[[FlowGraph], Contracted] = unchanged
    if anchors is not Anchors.NONE:
        narrow = partial(with_early_updates, safe=anchors is Anchors.SAFE)

    def narrowed(
        flow: FlowGraph, known: Candidate, heuristic: Heuristic, solver: str, deadline: float
    ) -> tuple[Candidate, SolverReport]:
        best, report = improve(flow, known, heuristic, solver, deadline, techniques, narrow)
        if anchors is Anchors.PAPER:
            # A bound for the narrowed graph need not hold for this one.
            effect = SolverEffect.NONE if report.effect is SolverEffect.CONFIRMED else report.effect
            report = replace(report, bound_bytes=None, effect=effect)
        return best, report

    return order_by_solver(problem, solver, time_limit, narrowed)
