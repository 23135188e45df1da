"""Rewrites of a graph with the same bits and a smaller peak, before it is ordered.

An order can be no better than its graph, so these let backward keep less: something smaller that tells the
same, or what is kept for another reader anyway. Each is a function from a graph to what it has changed, and
its module says why nobody can tell and why no order needs more, or what does.

Those of the second kind may raise a peak, so a step that they have changed is planned without rewrites, too,
if a bound does not tell, and the smaller plan is taken (:mod:`olla_fx.rewriting`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from olla_fx.passes.rewrites import (
    activation_outputs,
    blocked_updates,
    boolean_masks,
    chunked_loss,
    loss_gradients,
    masks_behind_pooling,
    narrow_indices,
    packed_masks,
    row_updates,
    separate_parts,
    slices_of_cat,
    unread_arguments,
)
from olla_fx.passes.rewrites.edit import sizes_vary
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.rewrites import REWRITES, Change, LossChunks

__all__ = ["Wanted", "rewrite"]

_FUNCTIONS: Mapping[str, Callable[[fx.Graph, Wanted], list[Change]]] = {
    "chunked_loss": lambda graph, wanted: chunked_loss.chunk_losses(graph, wanted.loss_chunks, wanted.probe),
    "activation_outputs": lambda graph, _: activation_outputs.take_outputs_of_activations(graph),
    "masks_behind_pooling": lambda graph, _: masks_behind_pooling.mask_behind_pooling(graph),
    "slices_of_cat": lambda graph, _: slices_of_cat.read_slices_of_cat(graph),
    "unread_arguments": lambda graph, _: unread_arguments.drop_unread_arguments(graph),
    "boolean_masks": lambda graph, _: boolean_masks.keep_masks_as_truth_values(graph),
    "narrow_indices": lambda graph, wanted: narrow_indices.narrow_indices(graph, wanted.probe),
    "loss_gradients": lambda graph, _: loss_gradients.write_gradients_over(graph),
    "row_updates": lambda graph, _: row_updates.update_rows(graph),
    "blocked_updates": lambda graph, wanted: blocked_updates.update_in_blocks(
        graph, wanted.cuts, wanted.probe
    ),
    "separate_parts": lambda graph, _: separate_parts.separate_parts(graph),
    "packed_masks": lambda graph, wanted: packed_masks.pack_masks(graph, wanted.probe),
}


_AT_ALL_SIZES = frozenset(
    {"activation_outputs", "masks_behind_pooling", "unread_arguments", "boolean_masks", "narrow_indices"}
)
"""Rewrites that make no tensor of a layout that a graph whose sizes vary has no formulas for."""


@dataclass(frozen=True)
class Wanted:
    """Which rewrites are wanted, and for what.

    Attributes:
        names: among :data:`olla_fx.rewrites.REWRITES`.
        probe: says whether kernels give equal bits.
        cuts: the gradients to compute in blocks, by their operators' names, each with the bytes of a block.
        loss_chunks: how to compute losses in chunks; None to have them whole.
    """

    names: Collection[str]
    probe: Probe
    cuts: Mapping[str, int] = field(default_factory=dict)
    loss_chunks: LossChunks | None = None


def rewrite(graph: fx.Graph, wanted: Wanted) -> tuple[Change, ...]:
    """Apply rewrites.

    Args:
        graph: has fake values, and its updates in place; changed.
        wanted: says which.

    Returns:
        What was changed, in sequence.
    """
    changes = []
    possible = _AT_ALL_SIZES if sizes_vary(graph) else REWRITES
    for name in REWRITES:
        if name in wanted.names and name in possible:
            changes += _FUNCTIONS[name](graph, wanted)
    return tuple(changes)
