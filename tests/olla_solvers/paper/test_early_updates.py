"""Control edges for early weight updates: executable, and which of them keep the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.graph.flow import flow_of
from olla_solvers.ilp.techniques import ALL_TECHNIQUES
from olla_solvers.paper.early_updates import control_edges, weight_updates, with_early_updates
from olla_solvers.paper.ordering import Anchors, order_with_techniques
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import alexnet_step, problems, smallest_peak, training_steps

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@SETTINGS
@given(st.one_of(problems(most=8), training_steps()), st.booleans())
def test_control_edges_are_executable_and_safe_ones_keep_the_optimum(problem: Problem, safe: bool) -> None:
    flow, captured = flow_of(problem)
    edges = control_edges(flow, safe=safe)
    assert {update for update, _ in edges} <= set(weight_updates(flow))
    early = with_early_updates(flow, safe=safe)
    assert sorted(early.expand(range(flow.count))) == list(range(flow.count))
    position = {operator: timestep for timestep, (operator,) in enumerate(early.parts)}
    assert all(position[update] < position[anchor] for update, anchor in edges)
    assert early.flow.peak_bytes(range(flow.count)) == flow.peak_bytes(early.expand(range(flow.count)))
    before = tuple((captured[update], captured[anchor]) for update, anchor in edges)
    narrowed = smallest_peak(replace(problem, before=(*problem.before, *before)))
    assert narrowed == smallest_peak(problem) if safe else narrowed >= smallest_peak(problem)


@pytest.mark.parametrize("safe", [False, True])
def test_updates_run_before_the_next_layers_gradients(safe: bool) -> None:
    problem = alexnet_step()
    flow, captured = flow_of(problem)
    names = [problem.operators[operator].name for operator in captured]
    anchors = {names[update]: names[anchor] for update, anchor in control_edges(flow, safe=safe)}
    assert anchors["conv3_update_w"] == "conv2_backward"
    # The large weight gradients are made aside: to wait for them is the paper's choice, and not free.
    assert anchors.get("fc1_update_w") == (None if safe else "fc0_relu_backward")


def test_the_papers_anchor_can_lose_the_optimum() -> None:
    """The anchor need not wait for all that the update waits for."""
    arrays = (
        Array("a", 1, 0, (1,)),
        Array("b", 5, 1, (3,)),
        Array("gradient", 50, 2, (3, 5)),
        Array("state", 1, 4, (5,)),
    )
    problem = Problem(tuple(Operator(f"op{number}") for number in range(6)), arrays)
    flow, _ = flow_of(problem)
    assert control_edges(flow, safe=False) == ((5, 3),)
    assert control_edges(flow) == ()
    assert smallest_peak(problem) == 55
    assert smallest_peak(replace(problem, before=((5, 3),))) == 56
    uncontracted = replace(ALL_TECHNIQUES, contract=False, pieces=False)
    schedule = order_with_techniques(problem, solver="highs", techniques=uncontracted, anchors=Anchors.PAPER)
    assert schedule.solver.bound_bytes is None
