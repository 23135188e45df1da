"""The second tier of the guards: the exact, slow comparison of a model with what a plan assumes.

It runs if the generated prologue (:mod:`olla_fx.guards.source`) sees another object than before, decides
if anything really changed, and says what.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards.assumptions import Assumptions
from olla_fx.guards.inputs import Mode, Role, TensorSlot, TensorSpec, modules_within, step_modules


class ExactComparison:
    """Compares model, loss and settings with what a plan assumes.

    Attributes:
        assumed: what the plan assumes.
        modules: the modules that it was made for, by name.
        slots: each tensor's first place, its module there, and its kind.
        aliases: for every tied place its module, and the module and place it is tied to, which come first.
        hooks: the hooks of every module when the plan was made.
        children: the children of every module when the plan was made.
    """

    def __init__(
        self, assumed: Assumptions, model: nn.Module, loss_fn: object, *, differentiates: bool
    ) -> None:
        """Note the modules as they are now.

        Args:
            assumed: what the plan assumes.
            model: the user's.
            loss_fn: the user's, or None.
            differentiates: True if the plan is for calls that would make a graph for autograd.
        """
        self.assumed = assumed
        self.modules: Mapping[str, nn.Module] = step_modules(model, loss_fn)
        self.slots: list[tuple[TensorSlot, nn.Module, TensorSpec]] = []
        self.aliases: list[tuple[nn.Module, TensorSlot, nn.Module, TensorSlot]] = []
        for places, step_input in zip(assumed.slots, assumed.inputs, strict=False):
            first = places[0]
            if step_input.spec is not None:
                self.slots.append((first, self.modules[first.owner], step_input.spec))
            for other in places[1:]:
                holders = self.modules[first.owner], self.modules[other.owner]
                self.aliases.append((holders[0], first, holders[1], other))
        self.hooks = {name: torch_compat.module_hooks(module) for name, module in self.modules.items()}
        self.children = {
            name: list(torch_compat.children_of(module).items()) for name, module in self.modules.items()
        }
        self._model = model
        self._loss_fn = loss_fn
        self._loss_modules = modules_within(loss_fn)
        self._gradients_count = differentiates or assumed.mode is not Mode.INFERENCE

    def why_not(self) -> str | None:
        """Return why the plan no longer fits; None while it does."""
        autocast, planned = torch_compat.autocast_state(self.assumed.device), self.assumed.autocast
        if autocast[0] != planned[0] or (autocast[0] and autocast != planned):
            return "autocast was switched"
        if torch_compat.kernel_settings() != self.assumed.kernel_settings:
            return "the number of threads, oneDNN, the kernels of attention or determinism was switched"
        return (
            self._flags_changed()
            or self.structure_changed()
            or self._hooks_changed()
            or self.assumed.reads.changed()
            or self.tensors_lost()
            or self._gradients_changed()
        )

    def _flags_changed(self) -> str | None:
        for name, module in self.modules.items():
            if module.training is not self.assumed.module_training[name]:
                return f"module {name} changed between training and eval"
        return None

    def _hooks_changed(self) -> str | None:
        for name, module in self.modules.items():
            if torch_compat.module_hooks(module) != self.hooks[name]:
                return f"the hooks of module {name} changed"
        return None

    def structure_changed(self) -> str | None:
        """Return which module is another one, or has another place; None while all are the same."""
        modules = step_modules(self._model, self._loss_fn)
        if len(modules) != len(self.modules):
            return "modules were added or removed"
        for (name, module), (planned_name, planned) in zip(
            modules.items(), self.modules.items(), strict=True
        ):
            if name != planned_name:
                return f"module {planned_name} became {name}"
            if module is not planned:
                return f"module {name} was replaced"
            if list(torch_compat.children_of(module).items()) != self.children[name]:
                return f"module {name} has one of its children in another place"
        moved = modules_within(self._loss_fn) != self._loss_modules
        return "loss_fn has its modules in another place" if moved else None

    def tensors_lost(self) -> str | None:
        """Return which tensor is gone, of another kind, or tied otherwise than planned; None if none is."""
        holders: dict[int, str] = {}
        for slot, module, spec in self.slots:
            tensor = slot.table(module).get(slot.key)
            first_holder = holders.setdefault(id(tensor), slot.name)
            if tensor is not None and first_holder != slot.name:
                return f"{first_holder} and {slot.name} were tied"
            if tensor is None or not spec.fits(tensor):
                return f"{slot.name} changed its shape, layout, dtype or device"
        for first_module, first, module, other in self.aliases:
            if first.table(first_module)[first.key] is not other.table(module).get(other.key):
                return f"{first.name} and {other.name} are no longer tied"
        return None

    def _gradients_changed(self) -> str | None:
        """Return which tensor, of those that are all there, was frozen, unfrozen or given a hook."""
        for slot, module, spec in self.slots:
            tensor: torch.Tensor = slot.table(module)[slot.key]
            counts = self._gradients_count or slot.role is Role.PARAMETER
            if counts and tensor.requires_grad is not spec.requires_grad:
                return f"{slot.name} was frozen or unfrozen"
            hooks_count = self.assumed.mode is Mode.TRAINING and slot.role is Role.PARAMETER
            if hooks_count and torch_compat.tensor_hooks(tensor):
                return f"{slot.name} has a gradient hook"
        return None
