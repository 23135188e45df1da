"""Finds cross entropies of rows of logits in a graph: forward, and what computes their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from olla_fx.passes.rewrites.edit import tensor_of

aten = torch.ops.aten
NO_REDUCTION = 0
"""What a loss is told that leaves its rows apart."""


@dataclass(frozen=True)
class CrossEntropy:
    """The operators of one loss; nothing else reads log-softmax or the gradient of it.

    Attributes:
        log_softmax: of the logits, a row for each target.
        loss: picks the targets' and adds them up.
        loss_backward: the gradient of the log-softmax.
        gradient: of the logits.
    """

    log_softmax: fx.Node
    loss: fx.Node
    loss_backward: fx.Node
    gradient: fx.Node

    @property
    def rows(self) -> int:
        """The number of targets."""
        return int(cast(torch.Tensor, tensor_of(self.log_softmax)).shape[0])

    @property
    def reduction(self) -> Any:
        """What the loss does with its rows."""
        return self.loss.args[3]


def cross_entropies(graph: fx.Graph) -> Iterator[CrossEntropy]:
    """Yield the losses of a graph.

    Args:
        graph: with fake values; may be changed between two of them.
    """
    kind = aten._log_softmax_backward_data.default
    for gradient in list(graph.find_nodes(op="call_function", target=kind)):
        cross_entropy = _cross_entropy_of(gradient)
        if cross_entropy is not None:
            yield cross_entropy


def _cross_entropy_of(gradient: fx.Node) -> CrossEntropy | None:
    loss_backward, log_softmax, _, dtype = gradient.args
    if not isinstance(loss_backward, fx.Node) or not isinstance(log_softmax, fx.Node):
        return None
    if loss_backward.target is not aten.nll_loss_backward.default or loss_backward.args[1] is not log_softmax:
        return None
    value = tensor_of(log_softmax)
    if value is None or value.dim() != 2 or not value.is_contiguous() or value.dtype != dtype:
        return None
    losses = [user for user in log_softmax.users if user not in (gradient, loss_backward)]
    if len(losses) != 1 or losses[0].target is not aten.nll_loss_forward.default:
        return None
    is_last = log_softmax.target is aten._log_softmax.default and log_softmax.args[1] in (1, -1)
    # What they do with rows, and the number that is ignored.
    same = losses[0].args[3:5] == loss_backward.args[4:6]
    if not is_last or not same or list(loss_backward.users) != [gradient]:
        return None
    return CrossEntropy(log_softmax, losses[0], loss_backward, gradient)
