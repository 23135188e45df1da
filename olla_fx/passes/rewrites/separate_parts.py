"""Copies the parts of a tensor into arrays of their own instead of one.

Attention's queries, keys and values come of one product, and are copied into one tensor of which each is a
part. If backward reads but one of them (scaled queries and keys are others' inputs), all stay until then.
Copied by themselves, the others are gone when forward has read them.

Each part lies in memory as it did, and begins at an aligned address as before, so that kernels do the same.

Harmless: the same bytes are copied, and each part is needed no longer than all were.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from olla_fx.alignment import alignment_of
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


def separate_parts(graph: fx.Graph) -> list[Change]:
    """Copy parts by themselves; see the module docstring.

    Args:
        graph: with fake values; changed, and its views' values are still those of the whole copy. Its sizes
            do not vary.

    Returns:
        What was changed.
    """
    changes = []
    for copy in list(graph.find_nodes(op="call_function", target=aten.clone.default)):
        parts = list(copy.users)
        kept = {
            part.args[2] for part in parts if part.target is aten.select.int and readers_in_backward(part)
        }
        if not _is_of_parts(copy, parts) or not 0 < len(kept) < cast(torch.Tensor, tensor_of(copy)).shape[0]:
            continue
        size_bytes, part_bytes = bytes_of(copy), bytes_of(parts[0])
        own: dict[object, fx.Node] = {}
        for part in parts:
            if part.args[2] not in own:
                own[part.args[2]] = _copy_part(copy, part)
            replace_by(part, own[part.args[2]])
        changes.append(Change("separate_parts", copy.name, size_bytes - len(kept) * part_bytes))
        graph.erase_node(copy)
    return changes


def _is_of_parts(copy: fx.Node, parts: list[fx.Node]) -> bool:
    """Return True if a contiguous copy is read by its parts alone, each of which begins as it would alone."""
    value = cast(torch.Tensor, tensor_of(copy))
    if not value.is_contiguous() or is_returned(copy) or value.dim() < 1:
        return False
    if any(part.target is not aten.select.int or part.args[1] != 0 for part in parts):
        return False
    aligned = bytes_of(parts[0]) % alignment_of(value.device) == 0 if parts else False
    return aligned and all(_lies_as_alone(part) for part in parts)


def _lies_as_alone(part: fx.Node) -> bool:
    value = cast(torch.Tensor, tensor_of(part))
    return value.stride() == torch.empty(value.shape, device="meta").stride()


def _copy_part(copy: fx.Node, part: fx.Node) -> fx.Node:
    source = insert(copy, aten.select.int, (copy.args[0], 0, part.args[2]))
    return insert(copy, aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
