"""Orders of the default path against exhaustive enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import peak_bytes
from olla_solvers.graph.flow import flow_of
from olla_solvers.order import order
from olla_solvers.order.greedy import RULES, best_order, list_schedule
from olla_solvers.plan import SolverStatus
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import (
    alexnet_step,
    mincut_bytes,
    mlp_step,
    precedence_bound,
    problems,
    smallest_peak,
)

MANY = settings(max_examples=400, deadline=None, derandomize=True)
FEW = settings(max_examples=12, deadline=None, derandomize=True)


@MANY
@given(problems())
def test_orders_without_a_program_are_proven_and_bounds_hold(problem: Problem) -> None:
    schedule = order(problem, solver="none")
    optimum = smallest_peak(problem)
    assert problem.is_executable(schedule.order)
    assert schedule.peak_bytes == peak_bytes(problem, schedule.order)
    assert schedule.lower_bound_bytes == optimum == schedule.peak_bytes
    assert schedule.proved_by in ("precedence bound", "exact search", "min-cut bound")
    flow, _ = flow_of(problem)
    assert precedence_bound(problem) <= mincut_bytes(flow) <= optimum
    assert max(flow.precedence_bytes) == precedence_bound(problem)


@MANY
@given(problems())
def test_greedy_lies_between_optimum_and_captured(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    best = best_order(flow, 0, float("inf"))
    assert smallest_peak(problem) <= best.peak_bytes <= peak_bytes(problem, problem.captured_order)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_makes_executable_orders(rule: str) -> None:
    for problem in (mlp_step(), alexnet_step()):
        flow, captured = flow_of(problem)
        key, backwards = RULES[rule]
        schedule = list_schedule(flow, key, backwards=backwards)
        assert schedule is not None
        assert problem.is_executable([captured[operator] for operator in schedule])


def test_no_solver_runs_by_default() -> None:
    schedule = order(alexnet_step())
    assert schedule.proved_by == "precedence bound"
    assert schedule.solver.status is SolverStatus.NOT_RUN


@FEW
@given(problems())
def test_auto_is_never_worse_than_greedy(problem: Problem) -> None:
    schedule = order(problem, time_limit=10)
    assert schedule.peak_bytes == schedule.lower_bound_bytes == smallest_peak(problem)


def test_trivial_problems() -> None:
    assert order(Problem((), ()), solver="none").peak_bytes == 0
    lonely = Problem((Operator("A", 7), Operator("B")), ())
    for solver in ("none", "cbc"):
        schedule = order(lonely, solver=solver)
        assert schedule.peak_bytes == schedule.lower_bound_bytes == 7
    assert order(Problem((), ()), solver="cbc").is_optimal


def test_files_may_list_operators_in_any_sequence() -> None:
    problem = Problem((Operator("B"), Operator("A")), (Array("x", 4, 1, (0,)),))
    assert problem.captured_order == (1, 0)
    assert order(problem, solver="none").order == (1, 0)
