"""Updates only those rows of an embedding that were looked up.

An embedding's gradient is as large as its table, and zero but for a few rows. Plain SGD adds it, times a
negative learning rate, so that all other rows get ``-0`` added, which changes nothing. The operator
``olla_fx::embedding_update_`` adds up the gradients of each token by ATen's own kernel, in eager's sequence,
into as many rows as there are tokens, and writes the updated rows. It takes eager's way if the factor is not
negative and finite.

Where momentum or Adam change every row in every step,
:mod:`olla_fx.passes.rewrites.blocked_updates` cuts the gradient into blocks.

Harmless: what it needs is smaller than the gradient.
"""

from __future__ import annotations

import torch
from torch import fx

from olla_fx import operators
from olla_fx.passes.rewrites.edit import (
    bytes_of,
    insert,
    is_exact_by_elements,
    tensor_of,
    writers_of,
    writers_of_sources,
)
from olla_fx.rewrites import Change

aten = torch.ops.aten
_ROWS_AT_ONCE = 4
"""What the operator needs, in rows for each token: sums, old rows, new rows, and numbers of tokens."""


def update_rows(graph: fx.Graph) -> list[Change]:
    """Update looked-up rows alone; see the module docstring.

    Args:
        graph: with fake values, its updates in place; changed. Its sizes do not vary.

    Returns:
        What was changed.
    """
    changes = []
    writers = writers_of(graph)
    for gradient in list(graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)):
        above, tokens, rows, padding, scales_by_frequency = gradient.args
        update = next(iter(gradient.users))
        count = tensor_of(tokens)
        if scales_by_frequency or len(gradient.users) > 1 or not _is_plain(update, gradient):
            continue
        if writers_of_sources(gradient, writers) or not is_exact_by_elements(gradient.meta["val"]):
            continue
        if count is None or _ROWS_AT_ONCE * count.numel() > rows:
            continue
        arguments = (update.args[0], above, tokens, padding, update.kwargs["alpha"])
        new = insert(update, operators.embedding_update_, arguments)
        changes.append(Change("row_updates", new.name, bytes_of(gradient)))
        update.replace_all_uses_with(new)
        graph.erase_node(update)
        graph.erase_node(gradient)
    return changes


def _is_plain(update: fx.Node, gradient: fx.Node) -> bool:
    """Return True if an update adds a gradient, times a number, to a table, and does nothing else."""
    return (
        update.target is aten.add_.Tensor
        and update.args[1] is gradient
        and isinstance(update.args[0], fx.Node)
        and update.args[0].op == "placeholder"
        and "alpha" in update.kwargs
    )
