"""Runs a call by the model itself, as eager PyTorch does, where there is no plan for it.

A whole training step leaves what the planned one leaves: the weights, the optimizer's state, the model's
buffers, and every ``.grad`` as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.capture import Mode, StepRequest
from olla_fx.capture.gradients import checked_loss, clip_gradients_of, joined, micro_batches, share_of_loss
from olla_fx.errors import StepInputError
from olla_fx.guards import WANTS_GRADIENT
from olla_fx.torch_compat import pytree


def run_in_eager(
    request: StepRequest, inputs: tuple[Any, ...], named: Mapping[str, Any] | None = None
) -> Any:
    """Run one call without a plan; return what the planned module returns.

    Args:
        request: what the module was planned for; its inputs are not read.
        inputs: of the call, as they were given.
        named: of the call, by name; not for a whole training step.

    Raises:
        CaptureError: if a batch cannot be cut into micro-batches, or the loss cannot be differentiated.
        StepInputError: if an input of a whole training step wants a gradient.
    """
    if request.mode is Mode.INFERENCE:
        with torch.no_grad():
            return torch_compat.call_itself(request.model, *inputs, **(named or {}))
    if request.mode is Mode.AUTOGRAD:
        return torch_compat.call_itself(request.model, *inputs, **(named or {}))
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise StepInputError(f"input {index} {WANTS_GRADIENT}")
    with torch.inference_mode(False), torch.enable_grad(), _own_gradients(request):
        return _training_step(request, inputs)


def _training_step(request: StepRequest, inputs: tuple[Any, ...]) -> Any:
    if request.loss_fn is None or request.optimizer is None:
        raise ValueError("a whole training step has a loss and an optimizer")
    options, optimizer = request.options, request.optimizer
    leaves, spec = pytree.tree_flatten(inputs)
    losses, answers = [], []
    for part in micro_batches(leaves, options.accumulation_steps):
        *arguments, target = pytree.tree_unflatten(part, spec)
        outputs = torch_compat.call_itself(request.model, *arguments)
        loss = share_of_loss(checked_loss(request.loss_fn(outputs, target)), options.accumulation_steps)
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        if options.return_outputs:
            answers.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs))
        del outputs, loss
    with torch.autocast(losses[0].device.type, enabled=False):
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = {
            id(parameter): parameter
            for module in request.modules().values()
            for parameter in module.parameters(recurse=False)
            if id(parameter) in trained and parameter.grad is not None
        }
        clip_gradients_of(list(parameters.values()), options)
        optimizer.step()
    total = sum(losses[1:], losses[0])
    return (total, joined(answers)) if options.return_outputs else total


@contextlib.contextmanager
def _own_gradients(request: StepRequest) -> Iterator[None]:
    """Set every ``.grad`` aside while a step makes and uses its own."""
    parameters = [
        tensor
        for module in request.modules().values()
        for tensor in torch_compat.parameters_of(module).values()
        if tensor is not None
    ]
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
