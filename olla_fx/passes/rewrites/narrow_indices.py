"""Keeps the positions of max-pooling's maxima in as few bits as they need.

ATen counts them from the start of a plane in 64 bits. On the CPU, operators of :mod:`olla_fx.pooling` stand
in for ATen's: forward returns positions within windows, of 2 to 8 bits, and backward reads them. Harmless:
what is kept is smaller, and there is nothing beside it.

Elsewhere, and for poolings that have no such form, positions are copied to a type that holds the plane's, and
widened again before backward, which gives the same numbers. Two moments need more, those in which both forms
are there; so the rewritten step is planned beside the other one, see :mod:`olla_fx.passes.rewrites`.
"""

from __future__ import annotations

import math
import operator
from typing import cast

import torch
from torch import fx

from olla_fx import operators, pooling
from olla_fx.fx_graph import LAYOUTS, Layout, layout_of, part_of
from olla_fx.kernels import cpu_kernels
from olla_fx.passes.rewrites.edit import (
    bytes_of,
    has_own_layout,
    insert,
    readers_in_backward,
    shape_arguments,
    sizes_vary,
    tensor_of,
)
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.rewrites import Change

aten = torch.ops.aten
_POOLINGS = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
"""Poolings, each with the number of dimensions of a plane."""

_PACKED_BACKWARD = {
    **pooling.PACKED_BACKWARD,
    **{operators.POOLING_BACKWARDS[backward]: packed for backward, packed in pooling.PACKED_BACKWARD.items()},
}


def narrow_indices(graph: fx.Graph, probe: Probe) -> list[Change]:
    """Keep indices of poolings in fewer bits; see the module docstring.

    Args:
        graph: with fake values; changed.
        probe: says whether anything is to run: what does needs kernels of our own.

    Returns:
        What was changed.
    """
    changes = []
    for kind, dimensions in _POOLINGS.items():
        for node in list(graph.find_nodes(op="call_function", target=kind)):
            indices = next((user for user in node.users if user.args[1] == 1), None)
            if indices is None or not _is_kept(indices):
                continue
            wide_bytes = bytes_of(indices)
            narrow = _pack(node, indices, dimensions, probe) or _copy(node, indices, dimensions)
            if narrow is not None:
                changes.append(Change("narrow_indices", node.name, wide_bytes - bytes_of(narrow)))
    return changes


def _is_kept(indices: fx.Node) -> bool:
    """Return True if all that reads indices is operators of backward, and at least one."""
    readers = readers_in_backward(indices)
    return bool(readers) and set(readers) == set(indices.users) and indices.target is operator.getitem


def _pack(node: fx.Node, indices: fx.Node, dimensions: int, probe: Probe) -> fx.Node | None:
    """Let a pooling return positions within windows, and its backward read them; None if it cannot be."""
    if node.target not in pooling.PACKED or node.kwargs:
        return None
    own = pooling.complete(node.args[1:])
    channels_last = _is_channels_last(indices, dimensions)
    if channels_last is None or not pooling.has_packed_form(node.meta["val"][0], own, dimensions):
        return None
    if probe.runs and cpu_kernels() is None:
        return None
    if not all(_reads_alike(reader, channels_last) for reader in indices.users):
        return None
    varies = sizes_vary(node.graph)
    how = (pooling.BITS[-1] if varies else pooling.bits_of(own, dimensions), channels_last)
    maxima, _ = node.meta["val"]
    packed = insert(node, pooling.PACKED[node.target], (node.args[0], *own, *how))
    # What views of the maxima show of their storage stays true.
    node.target, node.args = packed.target, packed.args
    node.meta["val"] = maxima, packed.meta["val"][1]
    node.graph.erase_node(packed)
    indices.meta["val"] = node.meta["val"][1]
    if varies:
        layout = _layout_of_bytes(cast(Layout, layout_of(indices)))
        node.meta[LAYOUTS] = [node.meta[LAYOUTS][0], layout]
        indices.meta[LAYOUTS] = [layout]
    for reader in list(indices.users):
        gradient, source, *others = reader.args
        if reader.target in pooling.PACKED_BACKWARD:
            others = [*shape_arguments(reader), *others]
        else:
            others = [source, *others]
        new = insert(
            reader, _PACKED_BACKWARD[reader.target], (gradient, *others, *how), layout=layout_of(reader)
        )
        reader.replace_all_uses_with(new)
        node.graph.erase_node(reader)
    return indices


def _is_channels_last(indices: fx.Node, dimensions: int) -> bool | None:
    """Return whether maxima lie in channels-last order, or are contiguous; None if neither, at some sizes."""
    value = cast(torch.Tensor, tensor_of(indices))
    if not value.numel():
        return None
    if layout_of(indices) is not None and 1 in value.shape:
        return None  # both, but perhaps not at other sizes
    if value.is_contiguous():
        return False
    is_channels_last = dimensions == 2 and value.dim() == 4
    return True if is_channels_last and value.is_contiguous(memory_format=torch.channels_last) else None


def _reads_alike(reader: fx.Node, channels_last: bool) -> bool:
    """Return True if an operator is a pooling's backward whose result lies in memory as maxima do."""
    value = tensor_of(reader)
    if reader.target not in _PACKED_BACKWARD or reader.kwargs or value is None:
        return False
    if reader.target in pooling.PACKED_BACKWARD:
        if not has_own_layout(reader, reader.args[1]):
            return False
    order = torch.channels_last if channels_last else torch.contiguous_format
    return value.is_contiguous(memory_format=order)


def _layout_of_bytes(wide: Layout) -> Layout:
    """Return the layout of as many bytes as there are indices of 8 bytes."""
    count = part_of(wide.own_bytes, torch.int64.itemsize)
    return Layout((count,), (1,), 0, count, count)


def _copy(node: fx.Node, indices: fx.Node, dimensions: int) -> fx.Node | None:
    """Keep indices in a narrower type; None if there is none, or sizes vary."""
    plane = math.prod(cast(torch.Tensor, tensor_of(node.args[0])).shape[-dimensions:])
    dtype = _narrowest(plane)
    if dtype is None or sizes_vary(node.graph):
        return None
    readers = list(indices.users)
    narrow = insert(indices.next, aten._to_copy.default, (indices,), {"dtype": dtype}, like=indices)
    for reader in readers:
        wide = insert(reader, aten._to_copy.default, (narrow,), {"dtype": torch.int64})
        reader.replace_input_with(indices, wide)
    return narrow


def _narrowest(plane: int) -> torch.dtype | None:
    if plane <= torch.iinfo(torch.uint8).max + 1:
        return torch.uint8
    if plane <= torch.iinfo(torch.int16).max + 1:
        return torch.int16
    if plane <= torch.iinfo(torch.uint16).max + 1:
        return torch.uint16
    return torch.int32 if plane <= torch.iinfo(torch.int32).max else None
