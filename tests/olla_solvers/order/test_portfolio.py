"""The portfolio: proofs, deadlines, large graphs, and TorchInductor's heuristics as the mark to meet."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import captured_order, peak_bytes, precedence_bound
from olla_solvers.baselines.inductor import HEURISTICS, dfs
from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import flow_of
from olla_solvers.order import order
from olla_solvers.order.greedy import free_first
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.order.search import SearchRules
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import alexnet_step, mlp_step, problems, smallest_peak
from tests.olla_solvers.order.large import is_executable, residual, wide

MANY = settings(max_examples=100, deadline=None, derandomize=True)


@pytest.mark.parametrize("switched_off", ["contract", "split", "mincut", "projection"])
def test_the_portfolio_proves_without_a_rule(switched_off: str) -> None:
    @MANY
    @given(problems())
    def check(problem: Problem) -> None:
        flow, _ = flow_of(problem)
        portfolio = Portfolio(flow, float("inf"), SearchRules(**{switched_off: False}))
        portfolio.run_short()
        portfolio.run_long(program=False)
        assert portfolio.best.peak_bytes == portfolio.bound_bytes == smallest_peak(problem)
        assert flow.peak_bytes(portfolio.best.order) == portfolio.best.peak_bytes

    check()


def test_a_residual_network_is_proven() -> None:
    problem = residual(150)
    start = time.process_time()
    schedule = order(problem, solver="none")
    assert schedule.is_optimal
    assert is_executable(problem, schedule.order)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_time_limit_is_kept_on_a_wide_graph(limit: float) -> None:
    problem = wide(800, 100)
    start = time.monotonic()
    schedule = order(problem, time_limit=limit)
    assert time.monotonic() - start < limit + 2
    assert is_executable(problem, schedule.order)
    assert precedence_bound(problem) <= schedule.lower_bound_bytes <= schedule.peak_bytes
    assert schedule.peak_bytes == peak_bytes(problem, schedule.order)


def test_more_time_does_not_worsen_order_or_bound() -> None:
    problem = wide(300, 60)
    some, more = (order(problem, solver="none", time_limit=limit) for limit in (0.05, 3))
    assert more.peak_bytes <= some.peak_bytes
    assert more.lower_bound_bytes >= some.lower_bound_bytes
    assert more.lower_bound_bytes > precedence_bound(problem)


def plain_lpmf(problem: Problem) -> tuple[int, ...]:
    """TorchInductor's own loop: all that is ready is looked at in every step."""
    planned = problem.planned
    done: list[int] = []
    gap = 0
    made = [sum(a.size_bytes for a in planned if a.producer == v) for v in range(len(problem.operators))]

    def freed(operator: int) -> int:
        return sum(
            array.size_bytes
            for array in planned
            if [each for each in array.consumers if each not in done] == [operator]
            or (array.producer == operator and not array.consumers)
        )

    while len(done) < len(problem.operators):
        ready = [
            v
            for v in range(len(problem.operators))
            if v not in done and all(each in done for each in problem.predecessors[v])
        ]
        chosen = min(ready, key=lambda v: (made[v] if made[v] > gap else 0, made[v] - freed(v), v))
        gap = max(gap, made[chosen]) - made[chosen] + freed(chosen)
        done.append(chosen)
    return tuple(done)


@MANY
@given(problems(most=12))
def test_least_peak_memory_first_does_what_the_plain_loop_does(problem: Problem) -> None:
    assert HEURISTICS["lpmf"](problem) == plain_lpmf(problem)


def marks(problem: Problem) -> dict[str, int]:
    """Peaks that no order may exceed."""
    flow, captured = flow_of(problem)
    found = {name: peak_bytes(problem, heuristic(problem)) for name, heuristic in HEURISTICS.items()}
    for by_net in (True, False):
        plain = tuple(captured[each] for each in free_first(flow, by_net=by_net))
        assert is_executable(problem, plain)
        found[f"free first {by_net}"] = peak_bytes(problem, plain)
    return found


@pytest.mark.parametrize("solver", ["none", "auto", "highs"])
def test_no_time_is_too_short_to_be_as_good_as_any_heuristic(solver: str) -> None:
    graphs = [mlp_step(), alexnet_step(), residual(10), wide(60, 20), wide(300, 300), wide(3000, 3000)]
    for problem in graphs:
        schedule = order(problem, solver=solver, time_limit=0)
        assert is_executable(problem, schedule.order)
        assert schedule.peak_bytes <= min(marks(problem).values())


@MANY
@given(problems(most=12))
def test_heuristics_are_never_better(problem: Problem) -> None:
    assert order(problem, solver="none", time_limit=0).peak_bytes <= min(marks(problem).values())


def test_depth_first_starts_from_the_operators_that_touch_least() -> None:
    operators = tuple(Operator(name) for name in "ABCD")
    arrays = (Array("a", 9, 0, (2,)), Array("b", 5, 1, (3,)), Array("c", 1, 2, (3,)))
    problem = Problem(operators, arrays)
    assert dfs(problem) == (1, 0, 2, 3)
    assert HEURISTICS["bfs"](problem) == captured_order(problem)


def test_contraction_that_runs_out_of_time_is_still_one() -> None:
    flow, _ = flow_of(residual(30))
    partial = contract(flow, deadline=0.0)
    assert partial.flow.count > contract(flow).flow.count
    assert sorted(partial.expand(range(partial.flow.count))) == list(range(flow.count))
