"""Cuts a batch into micro-batches, and clips the gradients that these add up to.

Gradients accumulate in tensors that the step makes (:mod:`olla_fx.run.micro_batches`), so that one
micro-batch is captured and run again and again. The arithmetic is that of an eager loop::

    for x, y in zip(xs.chunk(k), ys.chunk(k)):
        (loss_fn(model(x), y) / k).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from olla_fx.errors import CaptureError
from olla_fx.options import Options
from olla_fx.torch_compat import pytree


def micro_batches(leaves: Sequence[Any], count: int) -> list[list[Any]]:
    """Cut a step's arguments into micro-batches: tensors of the batch's length are cut, others repeated.

    Args:
        leaves: the arguments, flat; the length of the first tensor's first dimension is the batch size.
        count: the number of micro-batches.

    Returns:
        The flat arguments of each micro-batch, whose tensors are views.

    Raises:
        CaptureError: if the batch cannot be cut evenly.
    """
    if count == 1:
        return [list(leaves)]
    lengths = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not lengths or lengths[0] % count:
        raise CaptureError(
            f"a batch of {lengths[0] if lengths else 0} cannot be cut into {count} micro-batches of one "
            "size: choose a batch size that accumulation_steps divides"
        )
    parts_of_leaves = [
        leaf.chunk(count)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == lengths[0]
        else [leaf] * count
        for leaf in leaves
    ]
    return [[parts[index] for parts in parts_of_leaves] for index in range(count)]


def checked_loss(loss: object) -> torch.Tensor:
    """Return what a loss function gave, if it can be differentiated.

    Raises:
        CaptureError: if it is no scalar, or depends on nothing that is trained.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"loss_fn must return a scalar tensor, not {given}")
    if not loss.requires_grad:
        raise CaptureError("the loss depends on no parameter that the optimizer trains")
    return loss


def share_of_loss(loss: torch.Tensor, count: int) -> torch.Tensor:
    """Return what the loss of one of ``count`` micro-batches adds to the step's."""
    return loss if count == 1 else loss / count


def clip(gradients: Iterable[torch.Tensor | None], options: Options) -> None:
    """Clip gradients in place, as ``torch.nn.utils`` does."""
    if options.clip_grad_norm is None and options.clip_grad_value is None:
        return
    holders = []
    for gradient in gradients:
        if gradient is not None:
            holder = torch.empty_like(gradient)
            holder.grad = gradient
            holders.append(holder)
    clip_gradients_of(holders, options)


def clip_gradients_of(holders: Sequence[torch.Tensor], options: Options) -> None:
    """Clip the ``.grad`` of some tensors in place, as ``torch.nn.utils`` does."""
    if options.clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(holders, options.clip_grad_norm, foreach=False)
    if options.clip_grad_value is not None:
        torch.nn.utils.clip_grad_value_(holders, options.clip_grad_value, foreach=False)


def separated(
    gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return gradients as autograd keeps them: each a tensor of its own, in its parameter's layout.

    Args:
        gradients: one tensor may be the gradient of several parameters, or be expanded.
        parameters: one for each gradient.
    """
    seen: set[int] = set()
    results: list[torch.Tensor | None] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is not None and (id(gradient) in seen or gradient.stride() != parameter.stride()):
            copy = gradient.new_empty_strided(parameter.shape, parameter.stride())
            results.append(copy.copy_(gradient))
            continue
        if gradient is not None:
            seen.add(id(gradient))
        results.append(gradient)
    return results


def joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of all micro-batches as if they came from one batch."""
    if len(outputs) == 1:
        return outputs[0]
    leaves = [pytree.tree_leaves(output) for output in outputs]
    joined_leaves = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    return pytree.tree_unflatten(joined_leaves, pytree.tree_structure(outputs[0]))


def refuse_sparse(name: str, gradient: torch.Tensor | None) -> None:
    """Raise a ``CaptureError`` that names the parameter if its gradient is no strided tensor."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise CaptureError(f"the gradient of {name} is sparse; make its embedding with sparse=False")
