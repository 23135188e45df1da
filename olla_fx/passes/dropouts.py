"""Takes dropouts apart into the draw of a mask and a product with it; for the CPU.

Both run the kernels that ATen's operator runs, and need no memory beside their results; with ATen's
temporaries, a dropout that a checkpoint recomputes would need more than eager's. The mask no longer reads
what it is for, so that either can be dropped and made again on its own: the product from the mask, the mask
from the state of the generator (:mod:`olla_fx.draws`).

Shorter types are left alone: they round the product of mask and scale, which these forms do not compute, and
their result lies in memory as the mask does. So is a gradient that lies in memory otherwise than its mask.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from olla_fx import draws, operators
from olla_fx.fx_graph import LAYOUTS
from olla_fx.passes.rewrites.edit import insert, shape_arguments

aten = torch.ops.aten
_WIDE = (torch.float32, torch.float64)


def separate_masks(graph: fx.Graph) -> None:
    """Take the dropouts of a graph apart; see the module docstring.

    Args:
        graph: with fake values; changed.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.native_dropout.default)):
        _take_apart(node)
    for node in graph.find_nodes(op="call_function", target=operators.native_dropout_backward):
        if _lie_alike(node.meta["val"], node.args[1].meta["val"]):
            node.target = operators.dropout_backward


def _take_apart(dropout: fx.Node) -> None:
    results = {cast(int, user.args[1]): user for user in dropout.users}
    source, rate, is_training = cast(tuple[Any, ...], dropout.args)
    value, mask_value = dropout.meta["val"]
    if is_training is False or not results or not value.numel() or not _lie_alike(value, mask_value):
        return
    layouts = dropout.meta.get(LAYOUTS, (None, None))
    # Both lie in memory alike.
    shape = shape_arguments(next(iter(results.values())))
    mask = insert(dropout, draws.dropout_mask, (*shape, rate, value.device), like=dropout, layout=layouts[1])
    scale = 1.0 / (1.0 - rate) if rate < 1 else 0.0
    product = insert(dropout, operators.dropout_backward, (source, mask, scale), layout=layouts[0])
    # What views of them show of their storages stays true.
    product.meta["val"], mask.meta["val"] = value, mask_value
    for number, user in results.items():
        user.replace_all_uses_with((product, mask)[number])
        dropout.graph.erase_node(user)
    dropout.graph.erase_node(dropout)


def _lie_alike(result: torch.Tensor, mask: torch.Tensor) -> bool:
    return result.dtype in _WIDE and result.stride() == mask.stride()
