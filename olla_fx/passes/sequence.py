"""Lets the operators of a graph stand in another sequence that it allows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from olla_fx.fx_graph import free_nodes_before


def put_in_sequence(graph: fx.Graph, operators: Sequence[fx.Node]) -> None:
    """Let operators stand in a sequence, each behind what it needs that is no operator.

    Args:
        graph: changed.
        operators: all of them.
    """
    output = graph.output_node()
    placed: dict[fx.Node, None] = {
        node: None for node in graph.nodes if node.op in ("placeholder", "get_attr")
    }
    known = frozenset(operators)
    for node in (*operators, output):
        placed.update(dict.fromkeys(free_nodes_before(node, placed, known)))
        placed[node] = None
    unread = [node for node in graph.nodes if node not in placed]
    del placed[output]
    for node in (*placed, *unread):
        output.prepend(node)
