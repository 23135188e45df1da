"""Marks the end of forward and the start of backward in a graph that holds both.

Between the two the caller has the outputs, computes a loss, and comes back with the outputs' *tangents*. A
marker in the graph stands for that moment. Before it comes what the caller must find done: the
outputs, updates of buffers, random draws, and whatever reads parameters or inputs directly without needing
a tangent, for the caller may change those afterwards. Operators that only backward needs and that need no
tangent (the mask of an activation, say) are free to run on either side, wherever memory is lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import fx

from olla_fx.capture import Role, StepInput
from olla_fx.fx_graph import (
    ancestors,
    base_of,
    descendants,
    draws_random_numbers,
    forward_backward_boundary,
    is_free,
    storages_of,
    written_arguments,
)
from olla_fx.passes.reinplace_updates import aten


def mark_boundary(graph: fx.Graph, inputs: tuple[StepInput, ...], results: int) -> None:
    """Sort a graph into forward and backward and put the marker between them.

    Args:
        graph: with fake values, its updates in place.
        inputs: of its placeholders.
        results: the number of its results that the caller gets at the boundary; gradients follow.
    """
    placeholders = graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, inputs, strict=True)
    tangents = [node for node, step_input in pairs if step_input.role is Role.TANGENT]
    outputs: list[object] = list(cast(Sequence[object], graph.output_node().args[0]))[:results]
    forward = ancestors([output for output in outputs if isinstance(output, fx.Node)])
    backward = descendants(tangents)
    for node in graph.nodes:
        if node not in backward and _belongs_to_forward(node):
            forward |= ancestors([node])
    _keep_old_values(graph, forward)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    anchor = first.prev
    for node in [node for node in graph.nodes if node in forward and node.op != "placeholder"]:
        anchor.append(node)
        anchor = node
    with graph.inserting_after(anchor):
        graph.call_function(forward_backward_boundary, (tuple(cast(list[fx.Node], outputs)), tuple(tangents)))


def _belongs_to_forward(node: fx.Node) -> bool:
    if node.op != "call_function" or is_free(node):
        return False
    reads_inputs = any(base_of(source).op == "placeholder" for source in node.all_input_nodes)
    return reads_inputs or draws_random_numbers(node) or bool(written_arguments(node))


def _keep_old_values(graph: fx.Graph, forward: set[fx.Node]) -> None:
    """Copy a tensor that forward updates if backward reads the value from before the update."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    written: dict[int, int] = {}
    for node in forward:
        for target in written_arguments(node):
            for key in storages_of(target.meta.get("val")):
                if key is not None:
                    written[key] = max(position[node], written.get(key, -1))
    for node in [node for node in graph.nodes if node not in forward and node.op == "call_function"]:
        for source in node.all_input_nodes:
            keys = storages_of(source.meta.get("val"))
            ends = [written[key] for key in keys if key in written]
            if source.op in ("placeholder", "get_attr") or source in forward:
                if any(position[node] < end and position[source] < end for end in ends):
                    with graph.inserting_after(source):
                        kept = graph.call_function(aten.clone.default, (source,))
                    kept.meta["val"] = source.meta["val"].clone()
                    forward.add(kept)
                    node.replace_input_with(source, kept)
