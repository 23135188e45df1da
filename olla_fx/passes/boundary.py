"""Marks the end of forward, the start of backward and its end in a graph that holds both.

Between the two the caller has the outputs, computes a loss, and comes back with the outputs' *tangents*. A
marker in the graph stands for that moment. The caller may do anything meanwhile: change parameters, inputs
or outputs, look at buffers, draw random numbers. So whatever reads or writes a tensor that the caller
holds, and whatever draws, stays on the side on which eager runs it. This keeps recomputations of
checkpointed activations in backward, where they save memory. All other operators are free to
run on either side, as far as they need no tangent, wherever memory is lower: the mask of an activation, say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from olla_fx.capture import Role, StepInput
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import (
    IN_BACKWARD,
    LAYOUTS,
    ancestors,
    descendants,
    draws_random_numbers,
    end_of_backward,
    forward_backward_boundary,
    is_free,
    layout_of,
    layouts_agree,
    storages_of,
    written_arguments,
)
from olla_fx.passes.reinplace_updates import aten
from olla_fx.torch_compat import storage_key


def mark_boundary(graph: fx.Graph, inputs: tuple[StepInput, ...], results: int) -> bool:
    """Sort a graph into forward and backward, put the marker between them, and another one at the end.

    Args:
        graph: propagated with fake tensors, its updates in place.
        inputs: of its placeholders.
        results: the number of its results that the caller gets at the boundary; gradients follow.

    Returns:
        True if tensors were copied, so that the graph's metadata is out of date.
    """
    placeholders = graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, inputs, strict=True)
    tangents = [node for node, step_input in pairs if step_input.role is Role.TANGENT]
    returned = list(cast(Sequence[fx.Node], graph.output_node().args[0]))
    outputs: list[object] = list(returned[:results])
    made = [output for output in outputs if isinstance(output, fx.Node)]
    tied = _tied(graph, made)
    backward = descendants([*tangents, *(node for node in tied if node.meta.get(IN_BACKWARD))])
    forward = ancestors([*made, *(node for node in tied if node not in backward)])
    copied = _keep_old_values(graph, forward)
    _read_updates_from_the_caller(graph, placeholders)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    anchor = first.prev
    for node in [node for node in graph.nodes if node in forward and node.op != "placeholder"]:
        anchor.append(node)
        anchor = node
    with graph.inserting_after(anchor):
        graph.call_function(forward_backward_boundary, (tuple(cast(list[fx.Node], outputs)), tuple(tangents)))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(end_of_backward, (tuple(returned[results:]),))
    return copied


def tied_to_boundary(graph: fx.Graph) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return a graph's marker between forward and backward, and the operators that stay on their side of it.

    Those that precede the marker in the graph run before it in every order, the others after it. Without a
    marker there are none.
    """
    boundary = next(iter(graph.find_nodes(op="call_function", target=forward_backward_boundary)), None)
    if boundary is None:
        return None, []
    outputs = cast(Sequence[object], boundary.args[0])
    return boundary, _tied(graph, [output for output in outputs if isinstance(output, fx.Node)])


def _tied(graph: fx.Graph, outputs: Sequence[fx.Node]) -> list[fx.Node]:
    held = [*graph.find_nodes(op="placeholder"), *outputs]
    callers = {key for node in held for key in storages_of(node.meta.get("val"))} - {None}
    return [node for node in graph.nodes if _stays_on_its_side(node, callers)]


def _stays_on_its_side(node: fx.Node, callers: set[int | None]) -> bool:
    """Return True if the caller could notice on which side of the boundary a node runs."""
    if node.op != "call_function" or is_free(node):
        return False
    touched = {key for source in node.all_input_nodes for key in storages_of(source.meta.get("val"))}
    return not touched.isdisjoint(callers) or draws_random_numbers(node)


def _read_updates_from_the_caller(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> None:
    """Read a tensor that was updated in place by its own name, not as the update's result.

    Backward is handed results of forward, or copies of them, and may update the tensor again.
    """
    by_storage = {key: node for node in placeholders for key in storages_of(node.meta.get("val"))}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not written_arguments(node) or not isinstance(value, torch.Tensor):
            continue
        updated = by_storage.get(storage_key(value))
        old = None if updated is None else updated.meta["val"]
        same = old is not None and (value.shape, value.stride()) == (old.shape, old.stride())
        if updated is not None and same and layouts_agree(node, updated):
            node.replace_all_uses_with(updated)


def _note_layout(copy: fx.Node, source: fx.Node) -> None:
    """Note the layout of a copy, if sizes vary."""
    layout = layout_of(source)
    if layout is None:
        return
    if not layout.fills_storage:
        raise CaptureError(f"the layout of a copy of {source.name} at other sizes is not known")
    copy.meta[LAYOUTS] = [layout]


def _keep_old_values(graph: fx.Graph, forward: set[fx.Node]) -> bool:
    """Copy a tensor that forward updates if backward reads the value from before the update."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    copied = False
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
                    _note_layout(kept, source)
                    forward.add(kept)
                    node.replace_input_with(source, kept)
                    copied = True
    return copied
