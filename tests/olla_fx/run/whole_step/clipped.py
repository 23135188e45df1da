"""A whole step that accumulates gradients over parts of a batch and clips them, beside eager's loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.olla_fx.harness import Batch, WholeStep


class ClippedStep(WholeStep):
    """A step whose eager half does by hand what the planned one is asked for."""

    def __init__(
        self,
        *arguments: Any,
        parts: int = 1,
        norm: float | None = None,
        value: float | None = None,
        **options: Any,
    ) -> None:
        self.parts, self.norm, self.value = parts, norm, value
        super().__init__(
            *arguments, accumulation_steps=parts, clip_grad_norm=norm, clip_grad_value=value, **options
        )

    def train_eager(self, batch: Batch) -> Any:
        """Run one step of the eager model, part by part."""
        self.optimizers[0].zero_grad()
        losses, answers = [], []
        for *inputs, target in parts_of(batch, self.parts):
            answer = self.eager(*inputs)
            loss = self.loss_fn(answer, target)
            loss = loss / self.parts if self.parts > 1 else loss
            loss.backward()
            losses.append(loss.detach())
            answers.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, answer))
            del answer, loss
        if self.norm is not None:
            nn.utils.clip_grad_norm_(self.eager.parameters(), self.norm)
        if self.value is not None:
            nn.utils.clip_grad_value_(self.eager.parameters(), self.value)
        self.optimizers[0].step()
        total = sum(losses[1:], losses[0])
        if not self.return_outputs:
            return total
        return total, pytree.tree_map(_joined, *answers)


def parts_of(batch: Batch, count: int) -> list[list[Any]]:
    """Cut the tensors of a batch that are as long as the first one, and repeat everything else."""
    leaves, spec = pytree.tree_flatten(list(batch))
    length = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor))
    cut = [
        leaf.chunk(count)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == length
        else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*cut, strict=True)]


def _joined(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]
