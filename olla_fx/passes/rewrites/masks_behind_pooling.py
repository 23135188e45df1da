"""Masks the gradient of a ReLU before max-pooling's backward instead of behind it.

``threshold_backward(max_pool_backward(g, r, indices), r)`` keeps ``r``, what was pooled, for its mask.
``max_pool_backward(threshold_backward(g, pooled), r, indices)`` asks the pooled maxima, which are a quarter
as many and kept for the next layer anyway: each gradient goes where the maximum was, and the maximum is in
``pooled`` as it was in ``r``. Windows that share a maximum are masked alike, so that a sum over them is of
the same numbers or of none. If several ReLUs were concatenated before pooling, each slice of the gradient is
masked so, or none is.

That holds if pooling is the only way on which a gradient comes back to ``r``. ``r`` itself goes by
:mod:`olla_fx.passes.rewrites.unread_arguments`. In 16 bits, NaN and infinite gradients may differ where the
mask would have removed them.

Harmless: backward reads ``pooled`` in the place of ``r``, which was alive as long and is not smaller.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from olla_fx.fx_graph import layout_of
from olla_fx.passes.rewrites.edit import (
    bytes_of,
    insert,
    is_returned,
    readers_in_backward,
    same_layout,
    tensor_of,
)
from olla_fx.rewrites import Change

aten = torch.ops.aten
_POOLINGS = {
    aten.max_pool2d_with_indices_backward.default: aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default: aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool2d_backward.default: aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d_backward.default: aten.adaptive_max_pool3d.default,
}
_MASK = aten.threshold_backward.default


def mask_behind_pooling(graph: fx.Graph) -> list[Change]:
    """Mask gradients of pooled activations before they are spread; see the module docstring.

    Args:
        graph: with fake values; changed.

    Returns:
        What was changed.
    """
    changes: list[Change] = []
    for backward, forward in _POOLINGS.items():
        for node in list(graph.find_nodes(op="call_function", target=backward)):
            pooled = _pooled(node, forward)
            masks = None if pooled is None else _masks_behind(node)
            if pooled is None or not masks or not _is_smaller(pooled, node) or is_returned(pooled):
                continue
            saved_bytes = sum(bytes_of(cast(fx.Node, mask.args[1])) for mask in masks)
            changes.append(Change("masks_behind_pooling", node.name, saved_bytes))
            _mask_before(node, pooled, masks)
    return changes


def _pooled(backward: fx.Node, forward: object) -> fx.Node | None:
    """Return the maxima that a pooling gave, of whose positions its backward is told."""
    indices = backward.args[-1]
    if not isinstance(indices, fx.Node) or indices.target is not operator.getitem or backward.kwargs:
        return None
    pooling = cast(fx.Node, indices.args[0])
    if pooling.target is not forward or pooling.args[0] is not backward.args[1]:
        return None
    return next((user for user in pooling.users if user.args[1] == 0), None)


def _is_smaller(pooled: fx.Node, spread: fx.Node) -> bool:
    """Return True if maxima and gradient have one shape, and need no more memory than what was pooled."""
    maxima, gradient = tensor_of(pooled), tensor_of(spread.args[0])
    same = maxima is not None and gradient is not None and maxima.shape == gradient.shape
    return same and bytes_of(pooled) <= bytes_of(spread)


def _masks_behind(spread: fx.Node) -> list[fx.Node] | None:
    """Return the ReLU masks that read a spread gradient, if these are all that does."""
    source = cast(fx.Node, spread.args[1])
    users = list(spread.users)
    if len(users) == 1 and _masks_gradient_of(users[0], spread, source):
        return users if _is_kept_for(source, users) else None
    if source.target is not aten.cat.default:
        return None
    parts = cast(list[fx.Node], source.args[0])
    masks = [_mask_of_part(user, source, parts) for user in users]
    all_parts = [mask.args[1] for mask in masks if mask is not None]
    if None in masks or len(all_parts) != len(parts) or set(all_parts) != set(parts):
        return None
    complete = cast(list[fx.Node], masks)
    # The gradients of slices are dense again behind the mask, and so must be what takes their place.
    is_dense = all(tensor_of(mask).is_contiguous() for mask in complete)  # type: ignore[union-attr]
    return complete if is_dense and len({mask.args[2] for mask in complete}) == 1 else None


def _masks_gradient_of(mask: fx.Node, gradient: fx.Node, activation: object) -> bool:
    return mask.target is _MASK and mask.args[0] is gradient and mask.args[1] is activation


def _is_kept_for(activation: fx.Node, masks: list[fx.Node]) -> bool:
    """Return True if backward needs an activation for its masks and the shape of the gradient alone."""
    return set(readers_in_backward(activation)) <= {*masks, *cast(list[fx.Node], [masks[0].args[0]])}


def _mask_of_part(part: fx.Node, source: fx.Node, parts: list[fx.Node]) -> fx.Node | None:
    """Return the mask that alone reads the gradient of one of several concatenated activations."""
    mask = next(iter(part.users), None)
    if part.target is not aten.slice.Tensor or mask is None or len(part.users) != 1:
        return None
    dimension = source.args[1] if len(source.args) > 1 else 0
    start = 0
    for activation in parts:
        value = tensor_of(activation)
        if value is None or part.args[1] != dimension or value.dim() != source.meta["val"].dim():
            return None
        end = start + value.shape[cast(int, dimension)]
        if part.args[2] == start and len(part.args) == 4 and _end_of(part, source) == end:
            return mask if _masks_gradient_of(mask, part, activation) else None
        start = end
    return None


def _end_of(part: fx.Node, source: fx.Node) -> int:
    length = cast(torch.Tensor, tensor_of(source)).shape[cast(int, part.args[1])]
    return min(cast(int, part.args[3]), length)


def _mask_before(spread: fx.Node, pooled: fx.Node, masks: list[fx.Node]) -> None:
    masked = insert(spread, _MASK, (spread.args[0], pooled, masks[0].args[2]), layout=layout_of(pooled))
    spread.update_arg(0, masked)
    for mask in masks:
        gradient = cast(fx.Node, mask.args[0])
        if not same_layout(mask, gradient):
            gradient = insert(
                mask,
                aten.clone.default,
                (gradient,),
                {"memory_format": torch.contiguous_format},
                layout=layout_of(mask),
            )
        mask.replace_all_uses_with(gradient)
        mask.graph.erase_node(mask)
