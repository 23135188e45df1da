"""Lets backward read a part of a ``cat`` in the place of the tensor that was concatenated.

A ReLU's mask is asked of its output. If that went into a ``cat`` which a convolution keeps for its own
backward, the output is kept twice. The slice of the ``cat`` has the same numbers, and masks take any layout.
(A convolution would not: how its argument lies in memory chooses its kernel.)

All masks of one ``cat`` read it, or none does: the ``cat`` then stays until the last of them, for as long as
the last of its parts would have.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from olla_fx.passes.rewrites.edit import (
    bytes_of,
    insert,
    is_returned,
    readers_in_backward,
    replace_by,
    tensor_of,
)
from olla_fx.rewrites import Change

aten = torch.ops.aten
_MASKS = frozenset({aten.threshold_backward.default, aten.hardtanh_backward.default})


def read_slices_of_cat(graph: fx.Graph) -> list[Change]:
    """Let masks read slices; see the module docstring.

    Args:
        graph: with fake values; changed. Its sizes do not vary.

    Returns:
        What was changed.
    """
    changes = []
    for cat in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = cast(list[fx.Node], cat.args[0])
        masks = {part: readers_in_backward(part) for part in dict.fromkeys(parts)}
        kept = [part for part, readers in masks.items() if readers]
        if not readers_in_backward(cat) or not kept or len(masks) < len(parts) or is_returned(cat):
            continue
        # Empty tensors of one dimension may stand among others.
        if any(part.meta["val"].dim() != cat.meta["val"].dim() for part in parts):
            continue
        if all(_is_mask(reader, part) for part in kept for reader in masks[part]):
            for part in kept:
                for mask in masks[part]:
                    if _read_slice(mask, cat, part):
                        changes.append(Change("slices_of_cat", mask.name, bytes_of(part)))
    return changes


def _is_mask(reader: fx.Node, part: fx.Node) -> bool:
    return reader.target in _MASKS and reader.args[1] is part and reader.args[0] is not part


def _read_slice(mask: fx.Node, cat: fx.Node, part: fx.Node) -> bool:
    """Let a mask read its part of a ``cat``; False if its result would lie in memory otherwise."""
    dimension = cast(int, cat.args[1] if len(cat.args) > 1 else 0)
    parts = cast(list[fx.Node], cat.args[0])
    lengths = [cast(torch.Tensor, tensor_of(item)).shape[dimension] for item in parts]
    start = sum(lengths[: parts.index(part)])
    end = start + lengths[parts.index(part)]
    view = insert(mask, aten.slice.Tensor, (cat, dimension, start, end))
    new = insert(mask, mask.target, (mask.args[0], view, *mask.args[2:]))
    if replace_by(mask, new):
        return True
    view.graph.erase_node(view)
    return False
