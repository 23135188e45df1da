"""Keeps the positions of max-pooling's maxima in as few bytes as they need.

ATen counts them from the start of a plane in 64 bits. A plane of up to 256 elements needs 8, one of up to
65,536 needs 16. They are widened again before backward, which gives the same numbers.

Two moments need more, those in which both forms are there; so the rewritten step is planned beside the other
one, see :mod:`olla_fx.passes.rewrites`.
"""

from __future__ import annotations

import math
import operator
from typing import cast

import torch
from torch import fx

from olla_fx.passes.rewrites.edit import bytes_of, insert, readers_in_backward, tensor_of
from olla_fx.rewrites import Change

aten = torch.ops.aten
_POOLINGS = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
"""Poolings, each with the number of dimensions of a plane."""


def narrow_indices(graph: fx.Graph) -> list[Change]:
    """Keep indices of poolings in fewer bytes; see the module docstring.

    Args:
        graph: with fake values; changed. Its sizes do not vary.

    Returns:
        What was changed.
    """
    changes = []
    for pooling, dimensions in _POOLINGS.items():
        for node in list(graph.find_nodes(op="call_function", target=pooling)):
            plane = math.prod(cast(torch.Tensor, tensor_of(node.args[0])).shape[-dimensions:])
            indices = next((user for user in node.users if user.args[1] == 1), None)
            dtype = _narrowest(plane)
            if indices is not None and dtype is not None and _is_kept(indices):
                narrow, wide_bytes = _narrow(indices, dtype), bytes_of(indices)
                changes.append(Change("narrow_indices", node.name, wide_bytes - bytes_of(narrow)))
    return changes


def _narrowest(plane: int) -> torch.dtype | None:
    if plane <= torch.iinfo(torch.uint8).max + 1:
        return torch.uint8
    if plane <= torch.iinfo(torch.int16).max + 1:
        return torch.int16
    if plane <= torch.iinfo(torch.uint16).max + 1:
        return torch.uint16
    return torch.int32 if plane <= torch.iinfo(torch.int32).max else None


def _is_kept(indices: fx.Node) -> bool:
    """Return True if all that reads indices is operators of backward, and at least one."""
    readers = readers_in_backward(indices)
    return bool(readers) and set(readers) == set(indices.users) and indices.target is operator.getitem


def _narrow(indices: fx.Node, dtype: torch.dtype) -> fx.Node:
    readers = list(indices.users)
    narrow = insert(indices.next, aten._to_copy.default, (indices,), {"dtype": dtype}, like=indices)
    for reader in readers:
        wide = insert(reader, aten._to_copy.default, (narrow,), {"dtype": torch.int64})
        reader.replace_input_with(indices, wide)
    return narrow
