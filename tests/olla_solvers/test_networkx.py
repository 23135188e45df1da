"""Problems as networkx graphs, and back."""

from __future__ import annotations

from dataclasses import replace

import networkx
import pytest
from hypothesis import given, settings

from olla_solvers.errors import ProblemError
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from tests.olla_solvers.graphs import mlp_step, problems


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems())
def test_problems_survive(problem: Problem) -> None:
    expected = replace(problem, before=tuple(sorted(set(problem.before))))
    assert Problem.from_networkx(problem.to_networkx()) == expected


def test_edges_lead_along_the_flow_of_data() -> None:
    problem = Problem(
        (Operator("A", 8), Operator("B")),
        (Array("A", 10, 0, (1,), alignment=2), Array("w", 4, None, (0,), ArrayKind.STATIC)),
        ((0, 1),),
    )
    graph = problem.to_networkx()
    first, second = ("operator", "A"), ("operator", "B")
    assert set(graph.edges) == {
        (first, ("array", "A")),
        (("array", "A"), second),
        (("array", "w"), first),
        (first, second),
    }
    assert graph.nodes[first] == {"workspace_bytes": 8}
    assert graph.nodes["array", "A"] == {"size_bytes": 10, "kind": ArrayKind.PLANNED, "alignment": 2}


def test_a_graph_can_be_changed_before_it_is_read() -> None:
    graph = mlp_step().to_networkx()
    graph.add_edge(("operator", "update_b2"), ("operator", "update_b1"))
    problem = Problem.from_networkx(graph)
    names = [problem.operators[operator].name for operator in problem.captured_order]
    assert names.index("update_b2") < names.index("update_b1")


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ({"A": {}}, [], "'A' is neither"),
        ({("array", "x"): {"bytes": 4}}, [], "wrong attribute: .*'bytes'"),
        ({("array", "x"): {}}, [], "wrong attribute: .*'size_bytes'"),
        ({("array", "x"): {"size_bytes": 4}}, [], "has no producer"),
        (
            {("operator", "A"): {}, ("operator", "B"): {}, ("array", "x"): {"size_bytes": 4}},
            [(("operator", "A"), ("array", "x")), (("operator", "B"), ("array", "x"))],
            "'x' is made .* by two operators",
        ),
        (
            {("operator", "A"): {}, ("operator", "B"): {}},
            [(("operator", "A"), ("operator", "B")), (("operator", "B"), ("operator", "A"))],
            "form a cycle: '[AB]' -> '[AB]' -> '[AB]'",
        ),
    ],
)
def test_bad_graphs_are_named(nodes: dict, edges: list, words: str) -> None:  # type: ignore[type-arg]
    graph = networkx.DiGraph()
    for node, fields in nodes.items():
        graph.add_node(node, **fields)
    graph.add_edges_from(edges)
    with pytest.raises(ProblemError, match=words):
        Problem.from_networkx(graph)
