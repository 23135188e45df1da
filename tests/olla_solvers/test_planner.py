from __future__ import annotations

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import peak_bytes
from olla_solvers.order import order
from olla_solvers.order.alternatives import orders_of_peak
from olla_solvers.place import spans_of
from olla_solvers.placer import place_with
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import problems, training_steps
from tests.olla_solvers.order.large import wide

ARRAYS = (
    (9, (1, 3)), (15, (2, 3, 6)), (17, (5,)), (7, (4, 7)), (5, (5, 9, 10)), (4, (8,)), (12, (9,)), (12, ()),
    (16, (9,)), (17, (11,)), (14, (11,)), (16, ()),
)  # fmt: skip
"""Bytes and readers of what each operator makes."""


def hard_to_place() -> Problem:
    """Its captured order is optimal, but no placement of its arrays is as low as its peak."""
    return Problem(
        operators=tuple(Operator(f"o{number}") for number in range(len(ARRAYS))),
        arrays=tuple(
            Array(f"a{number}", size, number, readers) for number, (size, readers) in enumerate(ARRAYS)
        ),
    )


def test_another_order_of_the_same_peak_is_taken_where_the_first_leaves_a_gap() -> None:
    problem = hard_to_place()
    schedule = order(problem, solver="none")
    placement = place_with(spans_of(problem, schedule.order))
    assert (schedule.peak_bytes, placement.height_bytes, placement.proved_by) == (50, 52, "search")
    plan = make_plan(problem)
    assert (plan.peak_bytes, plan.buffer_bytes, plan.fragmentation) == (50, 50, 0.0)
    assert plan.provenance.order_found_by == "greedy:least net, contracted"
    assert plan.provenance.order_proved_by == schedule.proved_by
    assert plan.is_optimal


@pytest.mark.parametrize("solver", ["auto", "highs"])
def test_an_order_that_was_given_or_that_a_named_solver_is_to_place_is_kept(solver: str) -> None:
    problem = hard_to_place()
    schedule = order(problem, solver=solver) if solver == "auto" else None
    plan = make_plan(problem, solver=solver, schedule=schedule)
    assert plan.buffer_bytes == 52


@given(problems())
def test_other_orders_need_no_more(problem: Problem) -> None:
    check_orders(problem)


@given(training_steps())
def test_other_orders_of_training_steps_need_no_more(problem: Problem) -> None:
    check_orders(problem)


def check_orders(problem: Problem) -> None:
    peak = order(problem, solver="none").peak_bytes
    orders = [sequence for _, sequence in orders_of_peak(problem, peak)]
    assert len(set(orders)) == len(orders)
    for sequence in orders:
        position = {operator: time for time, operator in enumerate(sequence)}
        assert sorted(sequence) == list(range(len(problem.operators)))
        assert all(position[first] < position[then] for first, then in problem.edges)
        assert peak_bytes(problem, sequence) <= peak


@settings(max_examples=100, deadline=None, derandomize=True)
@given(training_steps())
def test_a_plan_without_time_reports_its_own_orders_peak(problem: Problem) -> None:
    """Greedy orders of the contracted graph may be better than the order that was cut short."""
    plan = make_plan(problem, time_limit=0)
    assert plan.lower_bound_bytes <= plan.peak_bytes <= plan.buffer_bytes


def test_no_other_order_where_none_is_good_enough() -> None:
    assert list(orders_of_peak(hard_to_place(), 49)) == []


def test_a_known_order_is_where_ordering_begins() -> None:
    problem = wide(200, 60)
    names = [operator.name for operator in problem.operators]
    greedy = make_plan(problem, time_limit=0)
    better = make_plan(problem, time_limit=4)
    assert better.peak_bytes < greedy.peak_bytes
    again = make_plan(problem, time_limit=0, start=better.order)
    assert (again.peak_bytes, again.order) == (better.peak_bytes, better.order)
    assert again.provenance.order_found_by == "earlier plan"
    for useless in ((), names[1:], names[::-1], [*names[1:], "another"], [*names, names[0]]):
        assert make_plan(problem, time_limit=0, start=useless).peak_bytes == greedy.peak_bytes
    assert make_plan(problem, time_limit=0, start=names).peak_bytes == greedy.peak_bytes
