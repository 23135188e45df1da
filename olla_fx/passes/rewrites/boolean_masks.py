"""Keeps truth values in the place of an activation that backward needs for nothing but its mask.

``threshold_backward(g, r)`` takes zero where ``r <= 0`` and ``g`` elsewhere, NaN included. If backward asks
no more of ``r`` than that (the next layer keeps something else: a dropout does, or a pooling), the mask is a
quarter as large, or half in 16 bits, and ``masked_fill`` gives the same gradients.

A moment needs more, that in which activation and mask are both there; so the rewritten step is planned
beside the other one, see :mod:`olla_fx.passes.rewrites`.
"""

from __future__ import annotations

import torch
from torch import fx

from olla_fx.fx_graph import IN_BACKWARD, Layout, is_free, layout_of, layouts_agree, part_of
from olla_fx.passes.rewrites.edit import (
    bytes_of,
    holds_exactly,
    insert,
    is_returned,
    readers_in_backward,
    replace_by,
    tensor_of,
)
from olla_fx.rewrites import Change

aten = torch.ops.aten


def keep_masks_as_truth_values(graph: fx.Graph) -> list[Change]:
    """Compare in forward, and keep the answers; see the module docstring.

    Args:
        graph: with fake values; changed.

    Returns:
        What was changed.
    """
    changes = []
    for mask in list(graph.find_nodes(op="call_function", target=aten.threshold_backward.default)):
        activation = mask.args[1]
        if not _is_kept_for_masks(activation) or not _are_numbers(activation):
            continue
        threshold = mask.args[2]
        if not layouts_agree(mask, mask.args[0]):
            continue
        if not holds_exactly(threshold, activation.meta["val"].dtype):
            continue
        layout = _layout_of_answers(activation)
        compared = insert(
            activation.next, aten.le.Scalar, (activation, threshold), like=activation, layout=layout
        )
        new = insert(mask, aten.masked_fill.Scalar, (mask.args[0], compared, 0), layout=layout_of(mask))
        if replace_by(mask, new):
            changes.append(Change("boolean_masks", new.name, bytes_of(activation) - bytes_of(compared)))
        else:
            graph.erase_node(compared)
    return changes


def _is_kept_for_masks(activation: fx.Node) -> bool:
    """Return True if backward reads an activation once, for its mask."""
    if activation.op != "call_function" or is_free(activation) or activation.meta.get(IN_BACKWARD):
        return False
    return not is_returned(activation) and len(readers_in_backward(activation)) == 1


def _are_numbers(activation: fx.Node) -> bool:
    """Return True if an activation is one of numbers that fill their storage, at all sizes."""
    value, layout = tensor_of(activation), layout_of(activation)
    return value is not None and value.is_floating_point() and (layout is None or layout.fills_storage)


def _layout_of_answers(activation: fx.Node) -> Layout | None:
    """Return the layout of an activation's truth values; None if sizes do not vary."""
    layout = layout_of(activation)
    if layout is None:
        return None
    size_bytes = part_of(layout.own_bytes, activation.meta["val"].element_size())
    return Layout(layout.shape, layout.stride, 0, size_bytes, size_bytes)
