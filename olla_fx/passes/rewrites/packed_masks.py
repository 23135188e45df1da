"""Keeps masks of truth values in a bit for each element instead of a byte, on the CPU.

Operators of :mod:`olla_fx.masks` take the places of a dropout's draw and products, and of the comparison and
the ``masked_fill`` that :mod:`olla_fx.passes.rewrites.boolean_masks` has put into a graph. Bits have the
sequence in which elements lie in memory, so that all tensors must be dense, and lie alike.

Harmless: a mask is smaller, and was alive as long. A dropout draws truth values as before, of which it needs
a byte for each until it has packed them; its plan has them among the kernels' workspaces.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from olla_fx import draws, masks, operators
from olla_fx.kernels import cpu_kernels
from olla_fx.passes.rewrites.edit import bytes_of, insert, tensor_of
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.rewrites import Change

aten = torch.ops.aten

LEAST_ELEMENTS = 1024
"""Of a mask that is packed."""


def pack_masks(graph: fx.Graph, probe: Probe) -> list[Change]:
    """Keep masks in bits; see the module docstring.

    Args:
        graph: with fake values; changed. Its sizes do not vary.
        probe: says whether anything is to run: what does needs kernels of our own.

    Returns:
        What was changed.
    """
    dropouts = graph.find_nodes(op="call_function", target=draws.dropout_mask)
    compared = graph.find_nodes(op="call_function", target=aten.le.Scalar)
    if not (dropouts or compared) or (probe.runs and cpu_kernels() is None):
        return []
    changes = [_pack_dropout(node) for node in list(dropouts)]
    changes += [_pack_comparison(node) for node in list(compared)]
    return [change for change in changes if change is not None]


def _pack_dropout(mask: fx.Node) -> Change | None:
    size, stride, rate, _ = cast(tuple[Any, ...], mask.args)
    readers = list(mask.users)
    if not readers or not all(_reads(user, mask, operators.dropout_backward) for user in readers):
        return None
    packed = insert(mask, masks.packed_dropout_mask, (size, stride, rate))
    for reader in readers:
        source, _, scale = cast(tuple[Any, ...], reader.args)
        _replace(reader, masks.packed_dropout_backward, (source, packed, scale))
    saved_bytes = bytes_of(mask) - bytes_of(packed)
    mask.graph.erase_node(mask)
    return Change("packed_masks", packed.name, saved_bytes)


def _pack_comparison(compared: fx.Node) -> Change | None:
    source, threshold = cast(tuple[Any, ...], compared.args)
    if not _is_packed(source) or type(threshold) not in (int, float) or not compared.users:
        return None
    fills = list(compared.users)
    if not all(_reads(user, compared, aten.masked_fill.Scalar) and user.args[2] == 0 for user in fills):
        return None
    packed = insert(compared, masks.packed_le, (source, float(threshold)))
    for reader in fills:
        _replace(reader, masks.packed_fill, (reader.args[0], packed))
    saved_bytes = bytes_of(compared) - bytes_of(packed)
    compared.graph.erase_node(compared)
    return Change("packed_masks", packed.name, saved_bytes)


def _is_packed(tensor: Any) -> bool:
    """Return True if a node's tensor is one that kernels of packed masks take."""
    value = tensor_of(tensor)
    if value is None or value.device.type != "cpu" or value.dtype != torch.float32:
        return False
    strides = value.stride()
    outermost_first = sorted(range(value.dim()), key=lambda dimension: -strides[dimension])
    return value.numel() >= LEAST_ELEMENTS and value.permute(outermost_first).is_contiguous()


def _reads(user: fx.Node, mask: fx.Node, target: object) -> bool:
    """Return True if an operator applies a mask to a tensor that lies in memory as it does."""
    if user.target is not target or user.args[1] is not mask or user.kwargs or not _is_packed(user.args[0]):
        return False
    tensors = [tensor_of(node) for node in (user.args[0], mask, user)]
    layouts = {(tensor.shape, tensor.stride()) for tensor in tensors if tensor is not None}
    return len(layouts) == 1


def _replace(reader: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Let another operator give the result of one; its value stays, with the views of it."""
    value = reader.meta["val"]
    new = insert(reader, target, arguments)
    new.meta["val"] = value
    reader.replace_all_uses_with(new)
    reader.graph.erase_node(reader)
