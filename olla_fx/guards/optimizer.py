"""What of an optimizer a plan depends on, and the exact test that it is as it was planned for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards.inputs import TensorSpec
from olla_fx.torch_compat import version_of

Groups = Sequence[Mapping[str, Any]]
InitialState = Callable[[torch.optim.Optimizer, Mapping[str, Any], torch.Tensor], dict[str, torch.Tensor]]
"""Returns the state that the optimizer's first step would give a parameter of a group."""


@dataclass(frozen=True, slots=True)
class ScalarSlot:
    """A late-bound number: its place in the optimizer.

    Attributes:
        name: unique, such as ``group0.lr`` or ``group1.betas.0``.
        group: index of the parameter group.
        key: its key in the group.
        element: its index if the group's value is a tuple, else None.
        parameter: for SGD's dampening, which is 0 in a parameter's first step, that parameter's name.
        positive: its sign when captured; optimizers choose code by it (``momentum > 0``).
    """

    name: str
    group: int
    key: str
    element: int | None = None
    parameter: str | None = None
    positive: bool = True

    def holds(self, groups: Groups) -> bool:
        """Return True if it is still a number, not a tensor, of the sign that was captured."""
        if isinstance(self._value(groups), torch.Tensor):
            return False
        value = self.read(groups)
        return value > 0 if self.positive else value < 0

    def read(self, groups: Groups) -> float:
        """Return its present value."""
        return float(self._value(groups))

    def _value(self, groups: Groups) -> Any:
        value = groups[self.group][self.key]
        return value if self.element is None else value[self.element]


@dataclass(frozen=True, slots=True)
class TensorHyperparameter:
    """A learning rate that the user keeps in a tensor: its place in the optimizer, and its kind."""

    name: str
    group: int
    key: str
    spec: TensorSpec

    def read(self, groups: Groups) -> Any:
        """Return the present object."""
        return groups[self.group][self.key]

    def holds(self, groups: Groups) -> bool:
        """Return True if that is still a tensor of this kind."""
        value = self.read(groups)
        return isinstance(value, torch.Tensor) and self.spec.fits(value)


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """What of an optimizer a plan depends on.

    Attributes:
        parameters: for each group, the names of its parameters.
        scalars: its late-bound numbers, all of them not 0 when captured (dampening excepted).
        constants: for each group, what is baked into the plan: flags, and numbers that are 0.
        tensors: hyper-parameters that are tensors.
    """

    parameters: tuple[tuple[str, ...], ...]
    scalars: tuple[ScalarSlot, ...]
    constants: tuple[tuple[tuple[str, Any], ...], ...]
    tensors: tuple[TensorHyperparameter, ...] = ()


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
        """Return True if the optimizer still holds it."""
        present = optimizer.state.get(self.parameter, {})
        return all(present.get(key) is value for key, value in self.values.items())

    def is_unwritten(self) -> bool:
        """Return True if no step has updated it."""
        return all(
            not value.is_inference() and version_of(value) == self.versions.get(key)
            for key, value in self.values.items()
        )


class OptimizerGuard:
    """Compares an optimizer with its layout, and gathers its state and numbers.

    Attributes:
        optimizer: the user's.
        layout: what was planned for.
        state: name, group, index in the group, and state keys of every parameter that is updated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: OptimizerLayout,
        state_keys: Mapping[str, tuple[str, ...]],
        specs: Mapping[str, TensorSpec | None],
        holders: Mapping[str, tuple[nn.Module, str]],
        initial_state: InitialState,
    ) -> None:
        """Prepare the guard.

        Args:
            optimizer: the user's.
            layout: what was planned for.
            state_keys: for each parameter that is updated, the keys of its state.
            specs: of the state, by parameter and key, dotted.
            holders: for each parameter, its module and its key there.
            initial_state: makes missing state.
        """
        self.optimizer = optimizer
        self.layout = layout
        self.state = [
            (name, group, index, state_keys[name])
            for group, names in enumerate(layout.parameters)
            for index, name in enumerate(names)
            if name in state_keys
        ]
        self._specs = specs
        self._holders = holders
        self._initial_state = initial_state
        self._created: dict[str, _CreatedState] = {}

    @property
    def has_new_state(self) -> bool:
        """True if state was created for the last call."""
        return bool(self._created)

    def why_not(self) -> str | None:
        """Return why the plan no longer fits the optimizer; None while it does."""
        groups = self.optimizer.param_groups
        if torch_compat.has_optimizer_pre_hooks(self.optimizer):
            return "the optimizer has a step pre-hook"
        if not self._has_planned_groups():
            return "the optimizer's parameter groups changed"
        if self._replaced():
            return "the optimizer holds another parameter than the model"
        for group, constants in zip(groups, self.layout.constants, strict=True):
            for key, value in constants:
                if isinstance(group.get(key), torch.Tensor) or group.get(key) != value:
                    return f"{key} changed from {value!r}"
        for slot in self.layout.scalars:
            if not slot.holds(groups):
                return f"{slot.name} became {slot.read(groups)}"
        for tensor in self.layout.tensors:
            if not tensor.holds(groups):
                return f"{tensor.name} became {tensor.read(groups)!r}"
        return self._state_changed(groups)

    def _state_changed(self, groups: Groups) -> str | None:
        for name, group, index, _ in self.state:
            for key, value in self.optimizer.state.get(groups[group]["params"][index], {}).items():
                spec = self._specs.get(f"{name}.{key}")
                if value is not None and (spec is None or not spec.fits(value)):
                    return f"the optimizer state {key!r} of {name} changed its kind"
        return None

    def _has_planned_groups(self) -> bool:
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        return sizes == [len(names) for names in self.layout.parameters]

    def _replaced(self) -> list[tuple[list[Any], int, Any]]:
        """Return list, index and new value of parameters that the model holds and the optimizer does not."""
        return [
            (group["params"], index, present)
            for group, names in zip(self.optimizer.param_groups, self.layout.parameters, strict=True)
            for index, (old, name) in enumerate(zip(group["params"], names, strict=True))
            if (present := self._present(name)) is not old
        ]

    def _present(self, name: str) -> Any:
        module, key = self._holders[name]
        return torch_compat.parameters_of(module).get(key)

    def adopt_parameters(self, modules: Callable[[], Iterable[nn.Module]]) -> None:
        """Let the optimizer hold the model's present parameters.

        ``load_state_dict(assign=True)`` and a ``.to()`` that replaces parameters leave the optimizer with
        the old ones, which eager would go on updating for nothing. Their positions tell which is which.

        Args:
            modules: returns all modules of the step as it is now.
        """
        replaced = self._replaced() if self._has_planned_groups() else []
        if not replaced:
            return
        state = self.optimizer.state
        own = {
            id(parameter) for module in modules() for parameter in torch_compat.parameters_of(module).values()
        }
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for parameters, index, new in reversed(replaced):
            old = parameters[index]
            if id(new) in held and id(old) not in own:
                # Tied to another one that is trained: no gradient will come to the old one.
                del parameters[index]
                state.pop(old, None)
            # One that the model still has is there because the user put it there.
            elif id(old) not in own and id(new) in own and isinstance(new, nn.Parameter):
                parameters[index] = new
                if old in state:
                    state[new] = state.pop(old)

    def gather(self) -> tuple[list[Any], dict[str, _CreatedState]]:
        """Return state, numbers and tensors in the order of the placeholders, and the state that is new."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        values: list[Any] = []
        created: dict[str, _CreatedState] = {}
        for name, group, index, keys in self.state:
            if not keys:
                continue
            parameter = groups[group]["params"][index]
            present: Mapping[str, Any] = state.get(parameter, {})
            before = self._created.get(name)
            if any(present.get(key) is None for key in keys):
                present = self._initial_state(self.optimizer, groups[group], parameter)
                versions = {key: version_of(new) for key, new in present.items() if not new.is_inference()}
                created[name] = _CreatedState(parameter, dict(present), versions)
            elif before is not None and before.is_in(self.optimizer) and before.is_unwritten():
                created[name] = before  # the run that it was made for raised
            values.extend(present[key] for key in keys)
        for slot in self.layout.scalars:
            values.append(0.0 if slot.parameter in created else slot.read(groups))
        values.extend(tensor.read(groups) for tensor in self.layout.tensors)
        return values, created

    def keep_created_state(self, created: dict[str, _CreatedState]) -> None:
        """Give the optimizer the state that :meth:`gather` created."""
        for new in created.values():
            self.optimizer.state[new.parameter].update(new.values)
        self._created = created

    def undo_created_state(self) -> None:
        """Take back the optimizer state that the last call created, after its run raised."""
        for new in self._created.values():
            if new.is_in(self.optimizer):
                state = self.optimizer.state[new.parameter]
                for key in new.values:
                    del state[key]
                if not state:
                    del self.optimizer.state[new.parameter]
        self._created = {}
