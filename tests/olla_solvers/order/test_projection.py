"""The projection bound: never above the optimum, and above what cuts at one operator see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.graph import minimum_cut
from olla_solvers.graph.flow import flow_of
from olla_solvers.graph.minimum_cut import live_bytes, smallest_state
from olla_solvers.order.projection import Projection, key_operators
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import mincut_bytes, problems, smallest_peak, training_steps

MANY = settings(max_examples=100, deadline=None, derandomize=True)


@settings(MANY, max_examples=300)
@given(st.one_of(problems(most=9), training_steps()))
def test_projections_are_bounds_and_contain_the_cut_at_one_operator(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    optimum = smallest_peak(problem)
    projection = Projection(flow, 0)
    projection.run(optimum + 1, float("inf"))
    assert projection.is_done
    assert projection.bound_bytes <= optimum
    (first, *_) = key_operators(flow)
    low = flow.ancestors[first]
    high = (1 << flow.count) - 1 & ~flow.descendants[first] & ~(1 << first)
    least, _ = smallest_state(flow, low, high, live_bytes(flow, low), float("inf"))
    assert projection.bound_bytes >= least + flow.rise_bytes[first]


def test_a_projection_sees_what_no_cut_at_one_operator_does() -> None:
    """Of three operators that each turn two inputs into nothing, one must run while all inputs are alive."""
    pairs = [(one, other) for one in range(3) for other in range(one)]
    operators = tuple(Operator(f"make{i}") for i in range(3)) + tuple(Operator(f"use{i}") for i in range(3))
    arrays = [
        Array(f"a{i}", 10, i, tuple(3 + at for at, pair in enumerate(pairs) if i in pair)) for i in range(3)
    ]
    arrays += [Array(f"b{at}", 9, 3 + at, (6,)) for at in range(3)]
    problem = Problem((*operators, Operator("end")), tuple(arrays))
    flow, _ = flow_of(problem)
    cuts = mincut_bytes(flow)
    projection = Projection(flow, 0)
    projection.run(smallest_peak(problem), float("inf"))
    assert cuts < projection.bound_bytes <= smallest_peak(problem)


@settings(MANY, max_examples=50)
@given(problems(most=9), st.integers(1, 4))
def test_an_interrupted_projection_reaches_the_same_bound(problem: Problem, every: int) -> None:
    flow, _ = flow_of(problem)
    looks = 0

    def interrupt(deadline: float) -> None:
        nonlocal looks
        looks += 1
        if looks % (every + 1) and looks < 200:
            raise DeadlinePassedError

    at_once, in_turns = Projection(flow, 0), Projection(flow, 0)
    at_once.run(1 << 60, float("inf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimum_cut, "check_time", interrupt)
        while not in_turns.is_done:
            in_turns.run(1 << 60, float("inf"))
            assert in_turns.bound_bytes <= at_once.bound_bytes
    assert in_turns.bound_bytes == at_once.bound_bytes
