"""Searching stretches of an order: what a stretch costs, and that an order only improves."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.graph.flow import flow_of
from olla_solvers.graph.split import piece_between
from olla_solvers.order.greedy import RULES, best_order, list_schedule
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.order.window_search import StretchSearch
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import problems
from tests.olla_solvers.order.large import wide

MANY = settings(max_examples=100, deadline=None, derandomize=True)


@MANY
@given(problems(most=9), st.data())
def test_a_stretch_costs_what_it_does_in_the_order(problem: Problem, data: st.DataObject) -> None:
    flow, _ = flow_of(problem)
    sequence = list_schedule(flow, *RULES["least net"][:1])
    assert sequence is not None
    start = data.draw(st.integers(0, flow.count - 1))
    end = data.draw(st.integers(start + 1, flow.count))
    piece = piece_between(flow, sequence, start, end)
    number = {original: local for local, original in enumerate(piece.parts) if original is not None}
    before = [local for local, original in enumerate(piece.parts) if original is None and local == 0]
    inner = [*before, *(number[each] for each in sequence[start:end])]
    costs = piece.flow.costs([*inner, *(each for each in range(piece.flow.count) if each not in inner)])
    assert costs[len(before) : len(inner)] == flow.costs(sequence)[start:end]


@MANY
@given(problems(most=12), st.integers(0, 2000))
def test_searching_stretches_never_worsens_and_can_be_continued(problem: Problem, bound: int) -> None:
    flow, _ = flow_of(problem)
    optimum = Portfolio(flow, float("inf"))
    optimum.run_short()
    stretches, sequence = StretchSearch(flow), tuple(range(flow.count))
    found = stretches.run(sequence, bound, float("inf"))
    assert sorted(found) == list(sequence)
    assert all(found.index(u) < found.index(v) for v in sequence for u in flow.predecessors[v])
    assert flow.peak_bytes(found) <= flow.peak_bytes(sequence)
    # The longest stretch is the whole graph, which is small here.
    assert flow.peak_bytes(found) <= max(bound, optimum.best.peak_bytes)
    assert stretches.run(found, bound, 0.0) == found


def test_stretches_improve_what_greedy_finds_on_wide_graphs() -> None:
    problem = wide(400, 50)
    flow, _ = flow_of(problem)
    greedy = best_order(flow, 0, float("inf"))
    found = StretchSearch(flow).run(greedy.order, 0, time.monotonic() + 2)
    assert flow.peak_bytes(found) < greedy.peak_bytes
