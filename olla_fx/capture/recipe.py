"""What people put between backward and update: accumulation over micro-batches, clipping of gradients.

Written with the operators of an eager loop that does the same::

    for x, y in zip(xs.chunk(k), ys.chunk(k)):
        (loss_fn(model(x), y) / k).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla_fx.errors import CaptureError
from olla_fx.torch_compat import pytree


@dataclass(frozen=True, slots=True)
class Recipe:
    """How gradients are made and treated before the update.

    Attributes:
        micro_batches: into how many parts the inputs are cut along their first dimension; gradients are
            those of the mean of the parts' losses.
        clip_grad_norm: largest norm of all gradients together, or None.
        clip_grad_value: largest magnitude of an element of a gradient, or None.
    """

    micro_batches: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        count = self.micro_batches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise CaptureError(f"micro_batches is a whole number of at least 1, not {count!r}")
        for name in ("clip_grad_norm", "clip_grad_value"):
            limit = getattr(self, name)
            number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if limit is not None and not (number and limit > 0):
                raise CaptureError(f"{name} is a number above 0 or None, not {limit!r}")

    def parts(self, arguments: Sequence[Any]) -> list[Sequence[Any]]:
        """The micro-batches of a step's arguments: tensors of the batch's length are cut, others repeated.

        Raises:
            CaptureError: when the batch cannot be cut evenly.
        """
        count = self.micro_batches
        if count == 1:
            return [arguments]
        leaves, spec = pytree.tree_flatten(list(arguments))
        lengths = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not lengths or lengths[0] % count:
            raise CaptureError(
                f"a batch of {lengths[0] if lengths else 0} cannot be cut into {count} micro-batches of one "
                "size: choose a batch that micro_batches divides"
            )
        cut = [
            leaf.chunk(count)
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == lengths[0]
            else [leaf] * count
            for leaf in leaves
        ]
        return [pytree.tree_unflatten([each[part] for each in cut], spec) for part in range(count)]

    def share(self, loss: torch.Tensor) -> torch.Tensor:
        """What a micro-batch's loss adds to the step's."""
        return loss if self.micro_batches == 1 else loss / self.micro_batches

    @property
    def writes_gradients(self) -> bool:
        """Whether gradients are added to or scaled where they are."""
        return self != Recipe()

    def clip(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Clip gradients in place, as ``torch.nn.utils`` does."""
        if self.clip_grad_norm is None and self.clip_grad_value is None:
            return
        holders = []
        for gradient in gradients.values():
            if gradient is not None:
                holder = torch.empty_like(gradient)
                holder.grad = gradient
                holders.append(holder)
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(holders, self.clip_grad_norm, foreach=False)
        if self.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(holders, self.clip_grad_value, foreach=False)


def separated(
    gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients as autograd puts them into ``.grad``: each a tensor of its own, in its parameter's layout.

    Args:
        gradients: one tensor may be the gradient of several parameters, or be expanded.
        parameters: whose they are.
    """
    seen: set[int] = set()
    own: list[torch.Tensor | None] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is not None and (id(gradient) in seen or gradient.stride() != parameter.stride()):
            copy = gradient.new_empty_strided(parameter.shape, parameter.stride())
            own.append(copy.copy_(gradient))
            continue
        if gradient is not None:
            seen.add(id(gradient))
        own.append(gradient)
    return own


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of all micro-batches as if of one batch."""
    if len(outputs) == 1:
        return outputs[0]
    leaves = [pytree.tree_leaves(each) for each in outputs]
    whole = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    return pytree.tree_unflatten(whole, pytree.tree_structure(outputs[0]))


def refuse_sparse(name: str, gradient: torch.Tensor | None) -> None:
    """Refuse a gradient that is no strided tensor.

    Raises:
        CaptureError: naming the parameter.
    """
    if gradient is not None and gradient.layout is not torch.strided:
        raise CaptureError(f"the gradient of {name} is sparse; make its embedding with sparse=False")
