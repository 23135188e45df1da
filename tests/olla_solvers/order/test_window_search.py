"""Searching windows of an order: an order only improves."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.effort.patience import Patience
from olla_solvers.graph.flow import flow_of
from olla_solvers.order.greedy import best_order
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.order.window_search import WindowSearch
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import problems
from tests.olla_solvers.order.large import wide

MANY = settings(max_examples=100, deadline=None, derandomize=True)


@MANY
@given(problems(most=12), st.integers(0, 2000))
def test_searching_windows_never_worsens_and_can_be_continued(problem: Problem, bound: int) -> None:
    flow, _ = flow_of(problem)
    optimum = Portfolio(flow, Patience.until(float("inf")))
    optimum.run_short()
    windows, sequence = WindowSearch(flow), tuple(range(flow.count))
    order = windows.run(sequence, bound, float("inf"))
    assert sorted(order) == list(sequence)
    assert all(order.index(u) < order.index(v) for v in sequence for u in flow.predecessors[v])
    assert flow.peak_bytes(order) <= flow.peak_bytes(sequence)
    # The longest stretch is the whole graph, which is small here.
    assert flow.peak_bytes(order) <= max(bound, optimum.best.peak_bytes)
    assert windows.run(order, bound, 0.0) == order


def test_windows_improve_what_greedy_finds_on_wide_graphs() -> None:
    problem = wide(400, 50)
    flow, _ = flow_of(problem)
    greedy = best_order(flow, 0, float("inf"))
    order = WindowSearch(flow).run(greedy.order, 0, time.monotonic() + 2)
    assert flow.peak_bytes(order) < greedy.peak_bytes
