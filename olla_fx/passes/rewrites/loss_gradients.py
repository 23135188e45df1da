"""Writes the gradient of a cross entropy over its log-softmax, some rows at a time.

The loss passes to the log-softmax a gradient that is as large as it, and zero but for one element of a row.
With the log-softmax and the gradient of the logits, that is two arrays of the size of the logits, the largest
of a language model. Every row is computed by itself, so a part of the rows goes after the other: only that
much of the gradient of the log-softmax is there at once, and the gradient of the logits takes the place of
the log-softmax, which nobody reads later.

The same kernels run, on rows; an element's sum over its row has one term that is not zero, so that its
sequence does not matter. Harmless: it needs less at each operator.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from olla_fx import operators
from olla_fx.passes.rewrites.cross_entropies import NO_REDUCTION, CrossEntropy, cross_entropies
from olla_fx.passes.rewrites.edit import bytes_of, insert
from olla_fx.rewrites import Change

aten = torch.ops.aten
MOST_PARTS = 16
LEAST_PART_BYTES = 2**20


def write_gradients_over(graph: fx.Graph) -> list[Change]:
    """Compute gradients of losses in parts; see the module docstring.

    Args:
        graph: with fake values; changed. Its sizes do not vary.

    Returns:
        What was changed.
    """
    changes = []
    for loss in cross_entropies(graph):
        size_bytes = bytes_of(loss.gradient)
        parts = min(MOST_PARTS, loss.rows, size_bytes // LEAST_PART_BYTES)
        if parts > 1:
            rows = -(-loss.rows // parts)
            changes.append(
                Change("loss_gradients", loss.gradient.name, size_bytes - size_bytes * rows // loss.rows)
            )
            _write_over(loss, rows)
    return changes


def _write_over(loss: CrossEntropy, rows: int) -> None:
    old, whole = loss.gradient, loss.log_softmax
    written = [
        _gradient_of_rows(loss, start, min(start + rows, loss.rows)) for start in range(0, loss.rows, rows)
    ]
    old.replace_all_uses_with(insert(old, operators.filled_, (whole, written)))
    old.graph.erase_node(old)
    old.graph.erase_node(loss.loss_backward)


def _gradient_of_rows(loss: CrossEntropy, start: int, end: int) -> fx.Node:
    above, whole, target, *others = loss.loss_backward.args

    def rows_of(node: Any) -> fx.Node:
        return insert(loss.gradient, aten.slice.Tensor, (node, 0, start, end), like=loss.loss_backward)

    if loss.reduction == NO_REDUCTION:
        above = rows_of(above)
    log_softmax = rows_of(whole)
    arguments = (above, log_softmax, rows_of(target), *others)
    spread = insert(loss.gradient, aten.nll_loss_backward.default, arguments, like=loss.loss_backward)
    return insert(
        loss.gradient,
        aten._log_softmax_backward_data.out,
        (spread, log_softmax, *cast(tuple[Any, ...], loss.gradient.args[2:])),
        {"out": log_softmax},
    )
