"""Flow graphs, contraction and splitting against exhaustive enumeration: the smallest peak stays."""

from __future__ import annotations

from hypothesis import given, settings

from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.graph.split import split
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import problems, smallest_peak
from tests.olla_solvers.order.large import residual

MANY = settings(max_examples=400, deadline=None, derandomize=True)


def smallest_flow_peak(flow: FlowGraph) -> int:
    """The same exhaustive answer for a flow graph."""
    best = {0: 0}
    states = [0]
    for state in states:
        for operator in range(flow.count):
            if state >> operator & 1 or any(not state >> p & 1 for p in flow.predecessors[operator]):
                continue
            alive = sum(
                array.size_bytes
                for array in flow.arrays
                if state >> array.producer & 1 and any(not state >> c & 1 for c in array.consumers)
            )
            cost = max(best[state], alive + flow.rise_bytes[operator])
            following = state | 1 << operator
            if following not in best:
                states.append(following)
            best[following] = min(best.get(following, cost), cost)
    return best[(1 << flow.count) - 1]


@MANY
@given(problems())
def test_flow_graph_and_contraction_keep_the_smallest_peak(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    contracted = contract(flow)
    optimum = smallest_peak(problem)
    assert smallest_flow_peak(flow) == optimum
    assert max(smallest_flow_peak(contracted.flow), contracted.floor_bytes) == optimum
    assert sorted(contracted.expand(range(contracted.flow.count))) == list(range(flow.count))


@MANY
@given(problems())
def test_an_expanded_order_costs_what_the_contracted_one_does(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    contracted = contract(flow)
    inner = tuple(range(contracted.flow.count))
    expected = max(contracted.flow.peak_bytes(inner), contracted.floor_bytes)
    assert flow.peak_bytes(contracted.expand(inner)) == expected


@MANY
@given(problems())
def test_pieces_hold_the_smallest_peak(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    pieces = split(flow)
    operators = [operator for piece in pieces for operator in piece.expand(range(piece.flow.count))]
    assert sorted(operators) == list(range(flow.count))
    assert max(smallest_flow_peak(piece.flow) for piece in pieces) == smallest_peak(problem)


def test_contraction_that_runs_out_of_time_is_still_one() -> None:
    flow, _ = flow_of(residual(30))
    partial = contract(flow, deadline=0.0)
    assert partial.flow.count > contract(flow).flow.count
    assert sorted(partial.expand(range(partial.flow.count))) == list(range(flow.count))
