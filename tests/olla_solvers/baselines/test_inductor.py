"""TorchInductor's heuristics, and that no order is worse than theirs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import peak_bytes
from olla_solvers.baselines.inductor import HEURISTICS, dfs
from olla_solvers.order import order
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import alexnet_step, mlp_step, problems
from tests.olla_solvers.order.large import residual, wide

MANY = settings(max_examples=100, deadline=None, derandomize=True)


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
            if [reader for reader in array.consumers if reader not in done] == [operator]
            or (array.producer == operator and not array.consumers)
        )

    while len(done) < len(problem.operators):
        ready = [
            v
            for v in range(len(problem.operators))
            if v not in done and all(earlier in done for earlier in problem.predecessors[v])
        ]
        chosen = min(ready, key=lambda v: (made[v] if made[v] > gap else 0, made[v] - freed(v), v))
        gap = max(gap, made[chosen]) - made[chosen] + freed(chosen)
        done.append(chosen)
    return tuple(done)


@MANY
@given(problems(most=12))
def test_least_peak_memory_first_does_what_the_plain_loop_does(problem: Problem) -> None:
    assert HEURISTICS["lpmf"](problem) == plain_lpmf(problem)


def test_depth_first_starts_from_the_operators_that_touch_least() -> None:
    operators = tuple(Operator(name) for name in "ABCD")
    arrays = (Array("a", 9, 0, (2,)), Array("b", 5, 1, (3,)), Array("c", 1, 2, (3,)))
    problem = Problem(operators, arrays)
    assert dfs(problem) == (1, 0, 2, 3)
    assert HEURISTICS["bfs"](problem) == problem.captured_order


@pytest.mark.parametrize(
    "problem",
    [mlp_step(), alexnet_step(), residual(10), wide(60, 20), wide(300, 300)],
    ids=["mlp", "alexnet", "residual", "narrow", "wide"],
)
def test_no_order_is_worse_than_theirs(problem: Problem) -> None:
    schedule = order(problem, solver="none")
    assert problem.is_executable(schedule.order)
    assert schedule.peak_bytes <= min(peak_bytes(problem, make(problem)) for make in HEURISTICS.values())


@MANY
@given(problems(most=12))
def test_orders_of_random_problems_are_no_worse_than_theirs(problem: Problem) -> None:
    schedule = order(problem, solver="none")
    assert schedule.peak_bytes <= min(peak_bytes(problem, make(problem)) for make in HEURISTICS.values())
