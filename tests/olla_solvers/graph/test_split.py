"""A part of an order as a graph of its own."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.graph.flow import flow_of
from olla_solvers.graph.split import piece_between
from olla_solvers.order.greedy import RULES, list_schedule
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import problems

MANY = settings(max_examples=100, deadline=None, derandomize=True)


@MANY
@given(problems(most=9), st.data())
def test_a_window_costs_what_it_does_in_the_order(problem: Problem, data: st.DataObject) -> None:
    flow, _ = flow_of(problem)
    sequence = list_schedule(flow, *RULES["least net"][:1])
    assert sequence is not None
    start = data.draw(st.integers(0, flow.count - 1))
    end = data.draw(st.integers(start + 1, flow.count))
    piece = piece_between(flow, sequence, start, end)
    number = {original: local for local, original in enumerate(piece.parts) if original is not None}
    before = [local for local, original in enumerate(piece.parts) if original is None and local == 0]
    inner = [*before, *(number[operator] for operator in sequence[start:end])]
    costs = piece.flow.costs(
        [*inner, *(operator for operator in range(piece.flow.count) if operator not in inner)]
    )
    assert costs[len(before) : len(inner)] == flow.costs(sequence)[start:end]
