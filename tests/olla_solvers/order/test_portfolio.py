"""The portfolio: proofs, deadlines, and large graphs."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import peak_bytes
from olla_solvers.effort.patience import Patience
from olla_solvers.graph.flow import flow_of
from olla_solvers.order import order
from olla_solvers.order.greedy import free_first
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.order.search import SearchRules
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import alexnet_step, mlp_step, precedence_bound, problems, smallest_peak
from tests.olla_solvers.order.large import residual, wide

MANY = settings(max_examples=100, deadline=None, derandomize=True)


@pytest.mark.parametrize("switched_off", ["contract", "split", "mincut", "projection"])
def test_the_portfolio_proves_without_a_rule(switched_off: str) -> None:
    @MANY
    @given(problems())
    def check(problem: Problem) -> None:
        flow, _ = flow_of(problem)
        portfolio = Portfolio(flow, Patience.until(float("inf")), SearchRules(**{switched_off: False}))
        portfolio.run()
        assert portfolio.best.peak_bytes == portfolio.bound_bytes == smallest_peak(problem)
        assert flow.peak_bytes(portfolio.best.order) == portfolio.best.peak_bytes

    check()


def test_a_residual_network_is_proven() -> None:
    problem = residual(150)
    start = time.process_time()
    schedule = order(problem, solver="none")
    assert schedule.is_optimal
    assert problem.is_executable(schedule.order)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_time_limit_is_kept_on_a_wide_graph(limit: float) -> None:
    problem = wide(800, 100)
    start = time.monotonic()
    schedule = order(problem, time_limit=limit)
    assert time.monotonic() - start < limit + 2
    assert problem.is_executable(schedule.order)
    assert precedence_bound(problem) <= schedule.lower_bound_bytes <= schedule.peak_bytes
    assert schedule.peak_bytes == peak_bytes(problem, schedule.order)


def test_more_time_does_not_worsen_order_or_bound() -> None:
    problem = wide(300, 60)
    some, more = (order(problem, solver="none", time_limit=limit) for limit in (0.05, 3))
    assert more.peak_bytes <= some.peak_bytes
    assert more.lower_bound_bytes >= some.lower_bound_bytes
    assert more.lower_bound_bytes > precedence_bound(problem)


def free_first_peak(problem: Problem) -> int:
    """The peak that no order may exceed."""
    flow, captured = flow_of(problem)
    peaks = []
    for by_net in (True, False):
        sequence = [captured[operator] for operator in free_first(flow, by_net=by_net)]
        assert problem.is_executable(sequence)
        peaks.append(peak_bytes(problem, sequence))
    return min(peaks)


@pytest.mark.parametrize("solver", ["none", "auto", "highs"])
def test_no_time_is_too_short_to_be_as_good_as_free_first_schedules(solver: str) -> None:
    graphs = [mlp_step(), alexnet_step(), residual(10), wide(60, 20), wide(300, 300), wide(3000, 3000)]
    for problem in graphs:
        schedule = order(problem, solver=solver, time_limit=0)
        assert problem.is_executable(schedule.order)
        assert schedule.peak_bytes <= free_first_peak(problem)


@MANY
@given(problems(most=12))
def test_free_first_schedules_are_never_better(problem: Problem) -> None:
    assert order(problem, solver="none", time_limit=0).peak_bytes <= free_first_peak(problem)
