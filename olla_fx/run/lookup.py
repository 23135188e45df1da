"""Finds every tensor of a step by name at each call, and notices when the plan no longer fits.

Nothing is held between calls but module objects and names: ``load_state_dict(assign=True)`` replaces
parameters, ``optimizer.load_state_dict`` replaces state and groups, ``.to()`` changes types in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture import CapturedStep, Mode, Role, StepRequest, TensorSlot, TensorSpec
from olla_fx.capture import optimizer as optimizers
from olla_fx.capture.inputs import WANTS_GRADIENT, modules_within
from olla_fx.errors import StepInputError
from olla_fx.run.glances import ModulesGlance, Place, TensorsGlance
from olla_fx.torch_compat import pytree

_StateKeys = tuple[int, int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _CreatedState:
    """Optimizer state made for a call, which counts as new until a step has written it.

    Attributes:
        parameter: whose state it is.
        values: by key.
        versions: how often each had been written when it was made.
    """

    parameter: torch.Tensor
    values: dict[str, torch.Tensor]
    versions: dict[str, int]

    def is_in(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still holds it."""
        present = optimizer.state.get(self.parameter, {})
        return all(present.get(key) is value for key, value in self.values.items())

    def is_unwritten(self) -> bool:
        """Whether no step has updated it."""
        return all(
            not value.is_inference() and value._version == self.versions.get(key)
            for key, value in self.values.items()
        )


class StepLookup:
    """The inputs of one captured step, found anew at every call."""

    def __init__(self, captured: CapturedStep, request: StepRequest) -> None:
        """Prepare the lookups.

        Args:
            captured: the step.
            request: the user's model, loss and optimizer.
        """
        self._captured = captured
        self._request = request
        self._model = request.model
        self._optimizer = request.optimizer
        modules = request.modules()
        self._modules = tuple(modules.items())
        flags = [captured.module_training[name] for name in modules]
        self._modules_glance = ModulesGlance(tuple(modules.values()), flags)
        self._loss_modules = modules_within(request.loss_fn)
        self._hooks = tuple(torch_compat.module_hooks(module) for module in modules.values())
        self._slots: list[tuple[TensorSlot, nn.Module, TensorSpec]] = []
        self._aliases: list[tuple[nn.Module, TensorSlot, nn.Module, TensorSlot]] = []
        for places, step_input in zip(captured.slots, captured.inputs, strict=False):
            first = places[0]
            if step_input.spec is not None:
                self._slots.append((first, modules[first.owner], step_input.spec))
            for other in places[1:]:
                self._aliases.append((modules[first.owner], first, modules[other.owner], other))
        self._on_meta = any(spec.device.type == "meta" for _, _, spec in self._slots)
        self._tensors_glance = TensorsGlance(self._places())
        holders = {slot.name: (module, slot.key) for slot, module, _ in self._slots}
        trained = () if captured.optimizer is None else captured.optimizer.parameters
        self._trained = [[holders[name] for name in names] for names in trained]
        self._examples = [each.spec for each in captured.inputs if each.role is Role.EXAMPLE]
        self._state_specs = {
            each.name: each.spec for each in captured.inputs if each.role is Role.STATE and each.spec
        }
        self._state = tuple(self._state_places())
        self._created: dict[str, _CreatedState] = {}

    def _places(self) -> list[Place]:
        places = [(module, slot.table_name, slot.key) for slot, module, _ in self._slots]
        for first_module, first, module, other in self._aliases:
            places.append((first_module, first.table_name, first.key))
            places.append((module, other.table_name, other.key))
        return places

    def _state_places(self) -> list[tuple[str, _StateKeys]]:
        if self._captured.optimizer is None:
            return []
        return [
            (name, (group, index, self._captured.state_keys[name]))
            for group, names in enumerate(self._captured.optimizer.parameters)
            for index, name in enumerate(names)
            if name in self._captured.state_keys
        ]

    def check_inputs(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        """The caller's tensors, flat; of the kinds that were planned.

        Raises:
            StepInputError: when an input is on the meta device, or wants a gradient of a whole training step.
        """
        # Lazy conjugation and negation are carried out: no kernel of a plan looks at their bits.
        tensors = [
            leaf.resolve_conj().resolve_neg()
            for leaf in pytree.tree_leaves(inputs)
            if isinstance(leaf, torch.Tensor)
        ]
        for index, tensor in enumerate(tensors):
            if tensor.is_meta:
                raise StepInputError(f"input {index} is on the meta device, on which nothing can run")
            if tensor.requires_grad and self._captured.mode is Mode.TRAINING:
                raise StepInputError(f"input {index} {WANTS_GRADIENT}")
        return tensors

    def outdated(self) -> str | None:
        """Why the plan no longer fits model and optimizer; None while it does."""
        autocast = torch_compat.autocast_state(self._captured.device)
        if autocast[0] != self._captured.autocast[0] or (autocast[0] and autocast != self._captured.autocast):
            return "autocast was switched"
        if torch_compat.kernel_settings() != self._captured.kernel_settings:
            return "the number of threads, oneDNN, the kernels of attention or determinism was switched"
        return self._modules_outdated() or self.tensors_outdated() or self._optimizer_outdated()

    def _modules_outdated(self) -> str | None:
        if self._modules_glance.shows_change() or self._loss_modules_differ():
            reason = self.structure_outdated() or self._flags_or_hooks_outdated()
            if reason is not None:
                return reason
        changed = self._captured.python_state.changed()
        return None if changed is None else f"{changed} changed"

    def _flags_or_hooks_outdated(self) -> str | None:
        for (name, module), hooks in zip(self._modules, self._hooks, strict=True):
            if module.training is not self._captured.module_training[name]:
                return f"module {name} changed between training and eval"
            if torch_compat.module_hooks(module) != hooks:
                return f"the hooks of module {name} changed"
        return None

    def structure_outdated(self) -> str | None:
        """Which module is another one, or has another place; None while all are the same."""
        if not self._modules_glance.shows_other_children() and not self._loss_modules_differ():
            return None
        modules = self._request.modules()
        if len(modules) != len(self._modules):
            return "modules were added or removed"
        present = zip(modules.items(), self._modules, strict=True)
        for (name, module), (planned_name, planned) in present:
            if name != planned_name:
                return f"module {planned_name} became {name}"
            if module is not planned:
                return f"module {name} was replaced"
        return "the model or its loss has one of its modules in another place"

    def _loss_modules_differ(self) -> bool:
        return modules_within(self._request.loss_fn) != self._loss_modules

    def tensors_outdated(self) -> str | None:
        """Why the plan no longer fits the model's tensors, whatever its flags; None while it does."""
        hooks_count = self._captured.mode is Mode.TRAINING
        if self._tensors_glance.shows_change() or (hooks_count and self._tensors_glance.shows_hooks()):
            reason = self.tensors_lost() or self._gradients_outdated()
            if reason is not None:
                return reason
            self._tensors_glance.remember()
        return None

    def tensors_lost(self) -> str | None:
        """Which tensor is gone, of another kind, or tied otherwise than planned; None if none is."""
        holders: dict[int, str] = {}
        for slot, module, spec in self._slots:
            tensor = slot.table(module).get(slot.key)
            first_holder = holders.setdefault(id(tensor), slot.name)
            if tensor is not None and first_holder != slot.name:
                return f"{first_holder} and {slot.name} were tied"
            if tensor is None or not spec.fits(tensor):
                return f"{slot.name} changed its shape, layout, dtype or device"
        for first_module, first, module, other in self._aliases:
            if first.table(first_module)[first.key] is not other.table(module).get(other.key):
                return f"{first.name} and {other.name} are no longer tied"
        return None

    def _gradients_outdated(self) -> str | None:
        """Which tensor, of those that are all there, was frozen, unfrozen or given a hook."""
        for slot, module, spec in self._slots:
            tensor = slot.table(module)[slot.key]
            gradient_counts = slot.role is Role.PARAMETER or self._captured.mode is not Mode.INFERENCE
            if gradient_counts and tensor.requires_grad is not spec.requires_grad:
                return f"{slot.name} was frozen or unfrozen"
            hooks_count = self._captured.mode is Mode.TRAINING and slot.role is Role.PARAMETER
            if hooks_count and torch_compat.tensor_hooks(tensor):
                return f"{slot.name} has a gradient hook"
        return None

    def _optimizer_outdated(self) -> str | None:
        layout, optimizer = self._captured.optimizer, self._optimizer
        if layout is None or optimizer is None:
            return None
        if torch_compat.has_optimizer_pre_hooks(optimizer):
            return "the optimizer has a step pre-hook"
        groups = optimizer.param_groups
        if [len(group["params"]) for group in groups] != [len(names) for names in layout.parameters]:
            return "the optimizer's parameter groups changed"
        if not self._holds_present_parameters(groups):
            return "the optimizer holds another parameter than the model"
        return _numbers_outdated(layout, groups) or self._state_outdated(optimizer)

    def _state_outdated(self, optimizer: torch.optim.Optimizer) -> str | None:
        for name, (group, index, _) in self._state:
            values = optimizer.state.get(optimizer.param_groups[group]["params"][index], {})
            for key, value in values.items():
                spec = self._state_specs.get(f"{name}.{key}")
                if value is not None and (spec is None or not spec.fits(value)):
                    return f"the optimizer state {key!r} of {name} changed its kind"
        return None

    def adopt_parameters(self) -> None:
        """Let the optimizer hold the model's present parameters.

        ``load_state_dict(assign=True)`` and a ``.to()`` that replaces parameters leave the optimizer with
        the old ones, which eager would go on updating for nothing. Position tells which is which.
        """
        layout = self._captured.optimizer
        if layout is None or self._optimizer is None:
            return
        groups = self._optimizer.param_groups
        if self._holds_present_parameters(groups):
            return
        if [len(group["params"]) for group in groups] != [len(names) for names in layout.parameters]:
            return
        present = {slot.name: slot.table(module).get(slot.key) for slot, module, _ in self._slots}
        replaced = [
            (group["params"], index, present[name])
            for group, names in zip(groups, layout.parameters, strict=True)
            for index, (old, name) in enumerate(zip(group["params"], names, strict=True))
            if present[name] is not old
        ]
        if not replaced:
            return
        modules = self._request.modules().values()
        own = {id(parameter) for module in modules for parameter in module._parameters.values()}
        held = {id(parameter) for group in groups for parameter in group["params"]}
        for parameters, index, new in reversed(replaced):
            old = parameters[index]
            if id(new) in held and id(old) not in own:
                # Tied to another one that is trained: no gradient will come to the old one.
                del parameters[index]
                self._optimizer.state.pop(old, None)
                continue
            # One that the model still has is there because the user put it there.
            if id(old) not in own and id(new) in own and isinstance(new, nn.Parameter):
                parameters[index] = new
                if old in self._optimizer.state:
                    self._optimizer.state[new] = self._optimizer.state.pop(old)

    def _holds_present_parameters(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the optimizer's parameters are the model's own, each in its planned place."""
        return len(groups) == len(self._trained) and all(
            len(group["params"]) == len(places)
            and all(
                module._parameters.get(key) is parameter
                for (module, key), parameter in zip(places, group["params"], strict=True)
            )
            for group, places in zip(groups, self._trained, strict=True)
        )

    def gather(self, examples: list[torch.Tensor]) -> list[Any]:
        """All values of the graph's placeholders, in order; creates missing optimizer state.

        Args:
            examples: from :meth:`check_inputs`.

        Raises:
            StepInputError: when a tensor is on the meta device, or shares its storage with one that the step
                updates.
        """
        values: list[Any] = self._tensors_glance.present()[: len(self._slots)]
        for value, (slot, _, _) in zip(values, self._slots, strict=True) if self._on_meta else ():
            if value.is_meta:
                raise StepInputError(
                    f"{slot.role} {slot.name} is on the meta device, on which nothing can run: give it "
                    "memory with to_empty and load_state_dict"
                )
        created: dict[str, _CreatedState] = {}
        if self._optimizer is not None and self._captured.optimizer is not None:
            created = self._gather_optimizer(self._optimizer, self._captured.optimizer, values)
        values.extend(examples)
        self._refuse_overlaps(values)
        # Only now: a call that is refused leaves the optimizer as it was.
        for each in created.values():
            if self._optimizer is not None:
                self._optimizer.state[each.parameter].update(each.values)
        self._created = created
        return values

    def undo_created_state(self) -> None:
        """Take back the optimizer state that the last call created, after its run raised."""
        if self._optimizer is None:
            return
        for each in self._created.values():
            if each.is_in(self._optimizer):
                state = self._optimizer.state[each.parameter]
                for key in each.values:
                    del state[key]
                if not state:
                    del self._optimizer.state[each.parameter]
        self._created = {}

    def _refuse_overlaps(self, values: list[Any]) -> None:
        """Refuse two inputs in one storage where the step writes one: the plan knows no order for them.

        Raises:
            StepInputError: naming both.
        """
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(set(torch_compat.storage_keys(tensors))) == len(tensors):
            return
        storages = [
            torch_compat.storage_key(value) if isinstance(value, torch.Tensor) and value.numel() else None
            for value in values
        ]
        written = {storages[index]: index for index in self._captured.written}
        for index, storage in enumerate(storages):
            other = written.get(storage, index)
            if storage is not None and other != index:
                one, two = (self._captured.inputs[each] for each in (index, other))
                raise StepInputError(
                    f"{one.role} {one.name} shares its storage with {two.role} {two.name}, which the step "
                    "updates: pass a clone of it"
                )

    def _gather_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        layout: optimizers.OptimizerLayout,
        values: list[Any],
    ) -> dict[str, _CreatedState]:
        """Append state and numbers; returns the state that no step has seen yet, by parameter."""
        groups = optimizer.param_groups
        created: dict[str, _CreatedState] = {}
        for name, (group, index, keys) in self._state:
            parameter = groups[group]["params"][index]
            if not keys:
                continue
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            before = self._created.get(name)
            if any(state.get(key) is None for key in keys):
                state = optimizers.initial_state(optimizer, groups[group], parameter)
                versions = {key: each._version for key, each in state.items() if not each.is_inference()}
                created[name] = _CreatedState(parameter, dict(state), versions)
            elif before is not None and before.is_in(optimizer) and before.is_unwritten():
                created[name] = before  # the run that it was made for raised
            values.extend(state[key] for key in keys)
        for slot in layout.scalars:
            values.append(0.0 if slot.parameter in created else slot.read(groups))
        values.extend(each.read(groups) for each in layout.tensors)
        return created


def _numbers_outdated(layout: optimizers.OptimizerLayout, groups: list[dict[str, Any]]) -> str | None:
    for group, constants in zip(groups, layout.constants, strict=True):
        for key, value in constants:
            if isinstance(group.get(key), torch.Tensor) or group.get(key) != value:
                return f"{key} changed from {value!r}"
    for slot in layout.scalars:
        if not slot.holds(groups):
            return f"{slot.name} became {slot.read(groups)}"
    for tensor in layout.tensors:
        if not tensor.holds(groups):
            return f"{tensor.name} became {tensor.read(groups)!r}"
    return None
