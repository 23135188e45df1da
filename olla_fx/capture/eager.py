"""An eager step under fake tensors: what PyTorch itself would do, followed without doing it.

The step runs ``zero_grad``, forward, ``backward`` and ``optimizer.step`` on fake copies, gradients
living in ``.grad`` as eager keeps them. It tells which parameters get a gradient, and what eager needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import optimizer as optimizers
from olla_fx.capture.constant_folding import KnownValues
from olla_fx.capture.inputs import tensor_slots
from olla_fx.capture.model_copy import ModelCopy
from olla_fx.capture.types import OutputAlias, StepRequest, plan_device
from olla_fx.eager.baseline import Baseline, dispatched_baseline
from olla_fx.guards import Mode, Role, TensorSlot, TensorSpec
from olla_fx.torch_compat import pytree


class FakeStep:
    """A fake copy of model, optimizer state and inputs; call it to run one eager step.

    Make and call it within ``self.fake_mode``'s reach only: its tensors hold no memory.
    """

    def __init__(self, request: StepRequest) -> None:
        """Copy what the step touches.

        Args:
            request: the step; its model and optimizer are not changed.
        """
        self.request = request
        self.fake_mode = torch_compat.new_fake_mode()
        originals = request.modules()
        slots = tensor_slots(originals)
        self._device = plan_device(request, slots)
        self.parameters: dict[str, nn.Parameter] = {}
        with self.fake_mode:
            tensors = [self._copy(places[0], originals[places[0].owner]) for places in slots]
            self._model_copy = ModelCopy(request, slots)
            self._model_copy.put(tensors)
            self._tensors = tensors
            self._inputs = pytree.tree_map_only(torch.Tensor, self._input, request.inputs)
            self._layout, self._state, self._scalars = self._copy_optimizer()

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        return TensorSpec.of(tensor).empty(meta_as=self._device)

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        wanted = tensor.requires_grad and self.request.mode is Mode.AUTOGRAD
        return self._empty(tensor).requires_grad_(wanted)

    def _copy(self, slot: TensorSlot, module: nn.Module) -> torch.Tensor:
        original = slot.table(module)[slot.key]
        copy = self._empty(original)
        if slot.role is Role.PARAMETER:
            self.parameters[slot.name] = nn.Parameter(copy, requires_grad=original.requires_grad)
            return self.parameters[slot.name]
        return copy

    def _copy_optimizer(self) -> tuple[Any, dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        optimizer = self.request.optimizer
        if optimizer is None:
            return None, {}, {}
        layout = optimizers.describe(optimizer, self.request.modules())
        state: dict[str, dict[str, torch.Tensor]] = {}
        for group, names in zip(optimizer.param_groups, layout.parameters, strict=True):
            for name, original in zip(names, group["params"], strict=True):
                present = {
                    key: self._empty(value)
                    for key, value in optimizer.state.get(original, {}).items()
                    if isinstance(value, torch.Tensor)
                }
                fake = self.parameters[name]
                state[name] = present or optimizers.initial_state(optimizer, group, fake)
        groups = optimizer.param_groups
        scalars: dict[str, Any] = {slot.name: slot.read(groups) for slot in layout.scalars}
        scalars |= {each.name: self._empty(each.read(groups)) for each in layout.tensors}
        return layout, state, scalars

    def __call__(self) -> object:
        """Run one eager step; gradients are left in ``.grad`` until the update is done."""
        with self.fake_mode, KnownValues():
            if self.request.mode is Mode.INFERENCE:
                with torch.no_grad():
                    return self._model_copy.model(*self._inputs)
            if self.request.mode is Mode.AUTOGRAD:
                return self.backward()
            loss = self.backward()
            self._update()
            return loss

    def forward(self) -> list[torch.Tensor]:
        """Run forward only; the tensors among its outputs."""
        with self.fake_mode, KnownValues(), torch.enable_grad():
            return _tensors_in(self._model_copy.model(*self._inputs))

    def aliases(self, outputs: Sequence[torch.Tensor]) -> list[OutputAlias | None]:
        """For each output what it looks into: a tensor of the model, an input, or another output.

        Args:
            outputs: from :meth:`forward`.
        """
        given = [*self._tensors, *_tensors_in(self._inputs)]
        bases: _Bases = {
            torch_compat.storage_key(each): (None, index, each) for index, each in enumerate(given)
        }
        for index in sorted(range(len(outputs)), key=lambda each: -outputs[each].numel()):
            output = outputs[index]
            size_bytes = output.numel() * output.element_size()
            if size_bytes == output.untyped_storage().nbytes() > 0:
                bases.setdefault(torch_compat.storage_key(output), (index, None, output))
        kept = [index for index, each in enumerate(outputs) if not _is_alias(index, each, bases)]
        return [
            None if index in kept else _alias(output, bases[torch_compat.storage_key(output)], kept)
            for index, output in enumerate(outputs)
        ]

    def backward(self) -> torch.Tensor:
        """Run forward and backward only."""
        with self.fake_mode, KnownValues(), torch.enable_grad():
            if self.request.mode is Mode.AUTOGRAD:
                outputs = self.forward()
                # Autograd follows what is handed out of the model's own tensors without the plan.
                pairs = zip(outputs, self.aliases(outputs), strict=True)
                sums = [output.sum() for output, alias in pairs if alias is None and output.requires_grad]
                del outputs, pairs
                total = torch.stack([each.real.double() for each in sums]).sum()
                total.backward()  # type: ignore[no-untyped-call]
                return total.detach()
            if self._model_copy.loss_fn is None:
                raise ValueError("a training step needs loss_fn")
            losses = []
            for *inputs, target in self.request.recipe.parts(self._inputs):
                outputs = self._model_copy.model(*inputs)
                loss = self.request.recipe.share(self._model_copy.loss_fn(outputs, target))
                del outputs
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            return sum(losses[1:], losses[0])

    def _update(self) -> None:
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.request.recipe.clip(gradients)
        if self.request.optimizer is not None:
            for name in gradients:
                self.parameters[name].grad = None
            optimizers.run_update(
                self.request.optimizer, self._layout, self.parameters, gradients, self._state, self._scalars
            )


_Bases = dict[int, tuple[int | None, int | None, torch.Tensor]]
"""By storage: the index of the output or of the placeholder that others are made from, and the tensor."""


def _tensors_in(structure: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _is_alias(index: int, output: torch.Tensor, bases: _Bases) -> bool:
    """Whether an output is to be made from another tensor; not the tensor that others are made from."""
    base = bases.get(torch_compat.storage_key(output))
    if base is None or base[0] == index or output.numel() == 0:
        return False
    return not output.is_conj() and not output.is_neg() and output.dtype == base[2].dtype


def _alias(
    output: torch.Tensor, base: tuple[int | None, int | None, torch.Tensor], kept: Sequence[int]
) -> OutputAlias:
    result, placeholder, tensor = base
    return OutputAlias(
        None if result is None else kept.index(result),
        placeholder,
        tuple(output.shape),
        output.stride(),
        int(output.storage_offset() - tensor.storage_offset()),
        output is tensor,
        tensor.requires_grad and not output.requires_grad,
    )


def eager_baseline(request: StepRequest) -> Baseline:
    """What eager PyTorch needs for a step, followed under fake tensors.

    Args:
        request: the step; nothing of it is changed, nothing is computed.

    Returns:
        The baseline, without the kernels' workspaces, which fake tensors cannot see.
    """
    with torch.random.fork_rng(devices=[]):
        return dispatched_baseline(FakeStep(request))
