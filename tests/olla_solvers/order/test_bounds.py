"""Bounds against exhaustive enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.graph.bitsets import bits_of
from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.graph.minimum_cut import live_bytes
from olla_solvers.order.projection import Projection
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import mincut_bytes, precedence_bound, problems, smallest_peak, training_steps

MANY = settings(max_examples=400, deadline=None, derandomize=True)


@MANY
@given(problems())
def test_mincut_bounds_hold_without_contraction(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    bound = mincut_bytes(flow)
    assert precedence_bound(problem) <= bound <= smallest_peak(problem)
    assert mincut_bytes(flow, 0.0) >= precedence_bound(problem)
    cuts = (smallest_cut(flow, operator) for operator in range(flow.count))
    assert bound == max(cuts)


def smallest_cut(flow: FlowGraph, operator: int) -> int:
    """Return what an operator costs from the best of all states that it can run from."""
    low, after = flow.ancestors[operator], flow.descendants[operator] | 1 << operator
    free = [operator for operator in range(flow.count) if not (low | after) >> operator & 1]
    best = []
    for chosen in range(1 << len(free)):
        state = low | sum(1 << operator for at, operator in enumerate(free) if chosen >> at & 1)
        if all(not flow.ancestors[operator] & ~state for operator in bits_of(state)):
            best.append(live_bytes(flow, state))
    return min(best) + flow.rise_bytes[operator]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bounds_hold_on_thousands_of_graphs() -> None:
    @settings(max_examples=5000, deadline=None, derandomize=True)
    @given(st.one_of(problems(most=9), training_steps()))
    def check(problem: Problem) -> None:
        optimum = smallest_peak(problem)
        flow, _ = flow_of(problem)
        projection = Projection(flow, 0)
        projection.run(optimum + 1, float("inf"))
        assert projection.bound_bytes <= optimum
        contracted = contract(flow)
        bound = max(contracted.floor_bytes, mincut_bytes(contracted.flow))
        assert precedence_bound(problem) <= mincut_bytes(flow) <= optimum
        assert precedence_bound(problem) <= bound <= optimum

    check()
