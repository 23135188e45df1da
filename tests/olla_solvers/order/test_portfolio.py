"""The portfolio: proofs, deadlines, large graphs, and TorchInductor's heuristics as the mark to meet."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import captured_order, peak_bytes, precedence_bound
from olla_solvers.errors import NoSolutionError
from olla_solvers.order import order
from olla_solvers.order.flow import flow_of
from olla_solvers.order.inductor import HEURISTICS, dfs
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.order.search import SearchRules
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import Builder, alexnet_step, mlp_step, problems, smallest_peak

MANY = settings(max_examples=100, deadline=None, derandomize=True)


def wide(count: int, window: int, seed: int = 0) -> Problem:
    """Every operator reads up to three of those shortly before it."""
    draw = random.Random(seed)
    readers: list[set[int]] = [set() for _ in range(count)]
    for reader in range(1, count):
        for _ in range(draw.randint(1, 3)):
            readers[draw.randrange(max(0, reader - window), reader)].add(reader)
    arrays = [Array(f"a{i}", 64 * draw.randint(1, 1000), i, tuple(sorted(readers[i]))) for i in range(count)]
    return Problem(tuple(Operator(f"op{i}") for i in range(count)), tuple(arrays))


def residual(blocks: int) -> Problem:
    """A chain of blocks with a shortcut around each, its gradients in reverse, and updates at the end."""
    step, updates = Builder(), []
    step.run("input", makes={"x0": 1000})
    for block in range(blocks):
        step.run(f"conv{block}", [f"x{block}"], {f"c{block}": 1000})
        step.run(f"relu{block}", [f"c{block}"], {f"r{block}": 1000})
        step.run(f"add{block}", [f"r{block}", f"x{block}"], {f"x{block + 1}": 1000})
    step.run("loss", [f"x{blocks}"], {f"g{blocks}": 1000})
    for block in reversed(range(blocks)):
        step.run(f"relu_grad{block}", [f"g{block + 1}", f"r{block}"], {f"d{block}": 1000})
        step.run(f"conv_grad{block}", [f"d{block}"], {f"e{block}": 1000})
        step.run(f"weight_grad{block}", [f"d{block}", f"x{block}"], {f"w{block}": 700 + block % 7})
        step.run(f"add_grad{block}", [f"e{block}", f"g{block + 1}"], {f"g{block}": 1000})
        updates.append(block)
    for block in updates:
        step.update(f"update{block}", [f"w{block}"], [f"conv{block}"])
    return step.build()


def is_executable(problem: Problem, sequence: Sequence[int]) -> bool:
    position = {operator: at for at, operator in enumerate(sequence)}
    return len(position) == len(problem.operators) and all(
        position[u] < position[v] for u, v in problem.edges
    )


@pytest.mark.parametrize("switched_off", ["contract", "split", "mincut"])
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


@pytest.mark.parametrize("name", HEURISTICS)
def test_inductors_heuristics_are_met(name: str) -> None:
    for problem in (mlp_step(), alexnet_step(), residual(10), wide(60, 20), wide(300, 300)):
        found = HEURISTICS[name](problem, float("inf"))
        assert is_executable(problem, found)
        assert order(problem, solver="none", time_limit=1).peak_bytes <= peak_bytes(problem, found)


def test_depth_first_starts_from_the_operators_that_touch_least() -> None:
    operators = tuple(Operator(name) for name in "ABCD")
    arrays = (Array("a", 9, 0, (2,)), Array("b", 5, 1, (3,)), Array("c", 1, 2, (3,)))
    problem = Problem(operators, arrays)
    assert dfs(problem) == (1, 0, 2, 3)
    assert HEURISTICS["bfs"](problem, float("inf")) == captured_order(problem)


@pytest.mark.parametrize("name", HEURISTICS)
def test_heuristics_give_up_at_their_deadline(name: str) -> None:
    with pytest.raises(NoSolutionError, match="deadline"):
        HEURISTICS[name](mlp_step(), 0.0)
