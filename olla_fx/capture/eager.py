"""Follows an eager step on fake tensors: what PyTorch itself would do, without computing it.

The step runs ``zero_grad``, forward, ``backward`` and ``optimizer.step`` on fake copies, gradients
living in ``.grad`` as eager keeps them. It tells which parameters get a gradient, and what eager needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import optimizer as optimizers
from olla_fx.capture.arguments import call_with
from olla_fx.capture.gradients import clip_gradients_of, micro_batches, share_of_loss
from olla_fx.capture.inputs import tensor_slots
from olla_fx.capture.model_copy import ModelCopy
from olla_fx.capture.symbols.sizes import SymbolicSizes
from olla_fx.capture.types import OutputAlias, StepRequest, plan_device
from olla_fx.capture.values.constant_folding import ConstantFolding
from olla_fx.capture.values.questions import Questions
from olla_fx.eager.baseline import FollowedStep, Signature, StepResults, follow_step
from olla_fx.guards import Mode, Role, TensorSlot, TensorSpec
from olla_fx.torch_compat import pytree

_FOLLOWED = 3
"""The number of micro-batches that are followed: later ones need what the second needs."""


class FakeStep:
    """A fake copy of model, optimizer state and inputs; call it to run one eager step.

    Make and call it within ``self.fake_mode``'s reach only: its tensors hold no memory.
    """

    def __init__(
        self,
        request: StepRequest,
        fake_mode: Any = None,
        inputs: Sequence[torch.Tensor] = (),
        symbols: SymbolicSizes | None = None,
        *,
        has_gradients: bool = False,
        questions: Questions | None = None,
    ) -> None:
        """Copy what the step touches.

        Args:
            request: the step; its model and optimizer are not changed.
            fake_mode: what the copies are made in; None for one of its own.
            inputs: fake tensors of this mode in the place of those among the inputs; none to copy these.
            symbols: stand for numbers that these answer.
            has_gradients: True if parameters that are trained have a ``.grad`` before the step.
            questions: answers what is asked of the inputs; by default the request's example does.
        """
        self.request = request
        self._symbols = symbols
        self._questions = questions or Questions(request, asks_numbers=False)
        self.fake_mode = fake_mode or torch_compat.new_fake_mode()
        given = iter(inputs)
        originals = request.modules()
        slots = tensor_slots(originals)
        self._device = plan_device(request, slots)
        self.parameters: dict[str, nn.Parameter] = {}
        with self.fake_mode:
            tensors = [self._copy(places[0], originals[places[0].owner]) for places in slots]
            self._model_copy = ModelCopy(request, slots)
            self._model_copy.put(tensors)
            self._tensors = tensors
            self._inputs = pytree.tree_map_only(
                torch.Tensor,
                lambda tensor: next(given, None) if inputs else self._input(tensor),
                request.inputs,
            )
            self._layout, self._state, self._scalars = self._copy_optimizer()
            for parameter in self.parameters.values():
                if has_gradients and parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        return TensorSpec.of(tensor).empty(meta_as=self._device)

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        requires_grad = tensor.requires_grad and self.request.mode is Mode.AUTOGRAD
        return self._empty(tensor).requires_grad_(requires_grad)

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
                existing = {
                    key: self._empty(value)
                    for key, value in optimizer.state.get(original, {}).items()
                    if isinstance(value, torch.Tensor)
                }
                fake = self.parameters[name]
                state[name] = existing or optimizers.initial_state(optimizer, group, fake)
        groups = optimizer.param_groups
        scalars: dict[str, Any] = {slot.name: slot.read(groups) for slot in layout.scalars}
        scalars |= {slot.name: self._empty(slot.read(groups)) for slot in layout.tensors}
        return layout, state, scalars

    def __call__(self) -> StepResults:
        """Run one eager step; its results are held as a loop holds them, gradients in ``.grad``."""
        if self.request.mode is Mode.INFERENCE:
            with self.fake_mode, self._folding(_tensors_in(self._inputs)), torch.no_grad():
                return StepResults(self._outputs())
        with self.fake_mode:
            outputs = self.backward()
            leaves = [*self.parameters.values(), *_tensors_in(self._inputs)]
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            if self.request.mode is Mode.TRAINING:
                self._update()
            return StepResults(outputs, gradients)

    def forward(self) -> list[torch.Tensor]:
        """Run forward only; return the tensors among its outputs."""
        with self.fake_mode, self._folding(_tensors_in(self._inputs)), torch.enable_grad():
            return self._outputs()

    def _outputs(self) -> list[torch.Tensor]:
        return _tensors_in(call_with(self._model_copy.model, self._inputs))

    def _folding(self, inputs: Sequence[torch.Tensor]) -> ConstantFolding:
        folding = ConstantFolding(self._questions, self._symbols)
        folding.give(inputs)
        return folding

    def aliases(self, outputs: Sequence[torch.Tensor]) -> list[OutputAlias | None]:
        """Return for each output what it is a view of: a tensor of the model, an input, or another output.

        Args:
            outputs: from :meth:`forward`.
        """
        placeholders = [*self._tensors, *_tensors_in(self._inputs)]
        bases: _Bases = {
            torch_compat.storage_key(tensor): (None, index, tensor)
            for index, tensor in enumerate(placeholders)
        }
        for index, output in sorted(
            enumerate(outputs), key=lambda pair: -torch_compat.hint_of(pair[1].numel())
        ):
            size_bytes = output.numel() * output.element_size()
            if size_bytes == output.untyped_storage().nbytes() > 0:
                bases.setdefault(torch_compat.storage_key(output), (index, None, output))
        kept = [index for index, output in enumerate(outputs) if not _is_alias(index, output, bases)]
        return [
            None if index in kept else _alias(output, bases[torch_compat.storage_key(output)], kept)
            for index, output in enumerate(outputs)
        ]

    def backward(self) -> list[torch.Tensor]:
        """Run forward and backward only; return what the step returns."""
        # Backward recomputes checkpoints, which ask again. Micro-batches are given one by one.
        given = [] if self.request.mode is Mode.TRAINING else _tensors_in(self._inputs)
        heard = self._model_copy.objects.heard()
        with heard, self.fake_mode, self._folding(given) as folding, torch.enable_grad():
            if self.request.mode is Mode.AUTOGRAD:
                outputs = self._outputs()
                # Autograd follows the model's own tensors among the outputs without the plan.
                pairs = zip(outputs, self.aliases(outputs), strict=True)
                sums = [output.sum() for output, alias in pairs if alias is None and output.requires_grad]
                del pairs
                total = torch.stack([output_sum.real.double() for output_sum in sums]).sum()
                total.backward()  # type: ignore[no-untyped-call]
                return [output.detach() for output in outputs]
            if self._model_copy.loss_fn is None:
                raise ValueError("a training step needs loss_fn")
            losses, count = [], self.request.options.accumulation_steps
            returned: list[torch.Tensor] = []
            leaves, spec = pytree.tree_flatten(self._inputs)
            for part in micro_batches(leaves, count)[:_FOLLOWED]:
                folding.give(_tensors_in(part))
                *inputs, target = pytree.tree_unflatten(part, spec)
                outputs = call_with(self._model_copy.model, inputs)
                loss = share_of_loss(self._model_copy.loss_fn(outputs, target), count)
                if self.request.options.return_outputs:
                    returned += [output.detach() for output in _tensors_in(outputs)]
                del outputs
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            return [sum(losses[1:], losses[0]), *returned]

    def _update(self) -> None:
        """Clip and update; the gradients stay where they are until the next step."""
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        holders = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        clip_gradients_of(holders, self.request.options)
        if self.request.optimizer is not None:
            optimizers.run_update(
                self.request.optimizer, self._layout, self.parameters, gradients, self._state, self._scalars
            )


_Bases = dict[int, tuple[int | None, int | None, torch.Tensor]]
"""By storage: the index of the output or of the placeholder that others are made from, and the tensor."""


def _tensors_in(structure: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _is_alias(index: int, output: torch.Tensor, bases: _Bases) -> bool:
    """Return True if an output is to be a view of another tensor, not the base of others."""
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
        output.storage_offset() - tensor.storage_offset(),
        output is tensor,
        tensor.requires_grad and not output.requires_grad,
    )


def follow_eager(
    request: StepRequest, workspaces: Mapping[Signature, int] | None = None, *, has_gradients: bool = False
) -> FollowedStep:
    """Follow what eager PyTorch does in a step, under fake tensors.

    Args:
        request: the step; nothing of it is changed, nothing is computed.
        workspaces: what operators request beside their results, which fake tensors cannot see, if known.
        has_gradients: True if the step adds to gradients that are there, which count as static.
    """
    with torch.random.fork_rng(devices=[]):
        return follow_step(FakeStep(request, has_gradients=has_gradients), workspaces or {})
