"""Removes copies, identities and temporaries that functionalisation and tracing leave behind.

A functional graph writes to nothing but its placeholders, so a ``clone`` that once protected a tensor
from an in-place activation protects it from nothing: EfficientNet-B0 holds 50 of them. Each is a whole
activation kept twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from olla_fx import draws
from olla_fx.capture import Role, StepInput
from olla_fx.fx_graph import is_marker, layouts_agree, storages_of
from olla_fx.torch_compat import OpOverload, schema_of, storage_key

aten = torch.ops.aten
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_CHECKS = frozenset({aten._assert_scalar.default, aten.sym_constrain_range_for_size.default})


def has_effect(node: fx.Node) -> bool:
    """Return True if a node must stay even if nothing reads it, as one that writes to its arguments."""
    if node.target is draws.random_state:
        return False
    is_operator = isinstance(node.target, OpOverload)
    return (is_operator and schema_of(node.target).is_mutable) or is_marker(node) or node.is_impure()


def drop_output_copies(graph: fx.Graph) -> None:
    """Let the graph return tensors themselves instead of the copies that capture put behind them.

    A result that is a bare placeholder keeps a ``detach``, as eager would return a tensor of its own.
    """
    output = graph.output_node()
    for node in list(output.all_input_nodes):
        if node.target is aten.clone.default and isinstance(node.args[0], fx.Node):
            output.replace_input_with(node, node.args[0])
    graph.eliminate_dead_code()


def drop_identities(graph: fx.Graph) -> None:
    """Drop ``detach`` and ``alias``, which do nothing in a graph that is never differentiated."""
    output = graph.output_node()
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if node.target not in _IDENTITIES or not isinstance(source, fx.Node):
            continue
        for user in list(node.users):
            if user is not output:
                user.replace_input_with(node, source)
        if not node.users:
            graph.erase_node(node)


def use_scalars_directly(graph: fx.Graph, inputs: Sequence[StepInput]) -> None:
    """Let late-bound numbers be Python's: drop the ``.item()`` of each, and checks of them."""
    for node in reversed(list(graph.nodes)):
        if node.target in _CHECKS:
            graph.erase_node(node)
    for node, step_input in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if step_input.role in (Role.SCALAR, Role.NUMBER):
            node.meta["val"] = step_input.number
            for user in list(node.users):
                user.replace_all_uses_with(node)
                graph.erase_node(user)
    graph.eliminate_dead_code()


def drop_dead_copies(graph: fx.Graph, given_early: int = 0) -> int:
    """Replace a ``clone`` by its source if nothing can tell them apart.

    That is so if the source is no placeholder (those are written to), fills its storage in the same layout
    (or the copy would free a larger storage early), and the copy is not returned.

    Args:
        graph: propagated with fake tensors; changed.
        given_early: the number of results that the caller gets, and may change, before backward: copies of
            these stay.

    Returns:
        The number of copies that were dropped.
    """
    returned = {
        key for node in graph.output_node().all_input_nodes for key in storages_of(node.meta.get("val"))
    }
    results = cast(Sequence[object], graph.output_node().args[0])[:given_early]
    given = {
        key for node in results if isinstance(node, fx.Node) for key in storages_of(node.meta.get("val"))
    }
    static = {
        key
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for key in storages_of(node.meta.get("val"))
    }
    dropped = 0
    for node in list(graph.find_nodes(op="call_function", target=aten.clone.default)):
        source = node.args[0]
        copied, original = node.meta.get("val"), source.meta.get("val")
        if not isinstance(copied, torch.Tensor) or not isinstance(original, torch.Tensor):
            continue
        is_whole = (
            copied.stride() == original.stride()
            and copied.untyped_storage().nbytes() >= original.untyped_storage().nbytes()
            and layouts_agree(node, source)
        )
        if is_whole and storage_key(copied) not in returned and storage_key(original) not in static | given:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            dropped += 1
    return dropped
