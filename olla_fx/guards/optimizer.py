"""The parts of an optimizer that a plan depends on, and the exact test that they are as planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards.inputs import Facts, TensorSpec

Groups = Sequence[Mapping[str, Any]]
InitialState = Callable[[torch.optim.Optimizer, Mapping[str, Any], torch.Tensor], dict[str, torch.Tensor]]
"""Returns the state that the optimizer's first step would give a parameter of a group."""
Created = dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Optimizer state made for a call: parameter and values by the parameter's name."""


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

    def read(self, groups: Groups) -> Any:
        """Return what is there now."""
        value: Any = groups[self.group][self.key]
        return value if self.element is None else value[self.element]


@dataclass(frozen=True, slots=True)
class TensorHyperparameter:
    """A learning rate that the user keeps in a tensor: its place in the optimizer, and its kind."""

    name: str
    group: int
    key: str
    spec: TensorSpec

    def read(self, groups: Groups) -> Any:
        """Return what is there now."""
        return groups[self.group][self.key]


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """The parts of an optimizer that a plan depends on.

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


class OptimizerGuard:
    """Compares an optimizer with its layout, and gathers its state and numbers.

    Attributes:
        optimizer: the user's.
        layout: what was planned for.
        state: group, index in the group, name and state by key of every parameter that is updated.
        created: state that was made for the last call.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: OptimizerLayout,
        state: Mapping[str, Mapping[str, TensorSpec | None]],
        holders: Mapping[str, tuple[nn.Module, str]],
        initial_state: InitialState,
    ) -> None:
        """Prepare the guard.

        Args:
            optimizer: the user's.
            layout: what was planned for.
            state: for each parameter that is updated, its state by key.
            holders: for each parameter, its module and its key there.
            initial_state: makes missing state.
        """
        self.optimizer = optimizer
        self.layout = layout
        self.state = [
            (group, index, name, state[name])
            for group, names in enumerate(layout.parameters)
            for index, name in enumerate(names)
            if name in state
        ]
        self._holders = holders
        self._initial_state = initial_state
        self.created: Created = {}

    def facts(self) -> Facts:
        """Yield what is said if the optimizer no longer fits a plan, and what tells."""
        groups, layout = self.optimizer.param_groups, self.layout
        hooks = torch_compat.has_optimizer_pre_hooks(self.optimizer)
        yield "the optimizer has a step pre-hook", hooks
        has_planned_groups = self._has_planned_groups()
        yield "the optimizer's parameter groups changed", has_planned_groups
        if not has_planned_groups:  # the other facts are of parameters by their places in groups
            return
        yield "the optimizer holds other parameters than the model", self._holds_the_models()
        for index, (group, constants) in enumerate(zip(groups, layout.constants, strict=True)):
            for key, _ in constants:
                value = group.get(key)
                tensor = isinstance(value, torch.Tensor)
                yield f"group{index}.{key} became {value!r}", "a tensor" if tensor else value
        for slot in layout.scalars:
            value = slot.read(groups)
            tensor = isinstance(value, torch.Tensor)
            yield f"{slot.name} became {value}", "a tensor" if tensor else (value > 0, value < 0)
        for hyperparameter in layout.tensors:
            value = hyperparameter.read(groups)
            fits = isinstance(value, torch.Tensor) and hyperparameter.spec.fits(value)
            yield f"{hyperparameter.name} is no longer a tensor of its kind", fits
        for group_index, index, name, specs in self.state:
            state = self.optimizer.state.get(groups[group_index]["params"][index], {})
            present = {key: value for key, value in state.items() if value is not None}
            wrong = [
                key
                for key, value in present.items()
                if (spec := specs.get(key)) is None or not spec.fits(value)
            ]
            yield f"the optimizer state {wrong} of {name} changed its kind", wrong

    def _has_planned_groups(self) -> bool:
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        return sizes == [len(names) for names in self.layout.parameters]

    def _holds_the_models(self) -> bool:
        return all(
            torch_compat.parameters_of(module).get(key) is parameter
            for group, names in zip(self.optimizer.param_groups, self.layout.parameters, strict=True)
            for parameter, name in zip(group["params"], names, strict=True)
            for module, key in [self._holders[name]]
        )

    def gather(self) -> tuple[list[Any], Created]:
        """Return state, numbers and tensors in the order of the placeholders, and the state that is new."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        values: list[Any] = []
        created: Created = {}
        for group, index, name, keys in self.state:
            parameter = groups[group]["params"][index]
            present: Mapping[str, Any] = state.get(parameter, {})
            if any(present.get(key) is None for key in keys):
                present = self._initial_state(self.optimizer, groups[group], parameter)
                created[name] = parameter, dict(present)
            values.extend(present[key] for key in keys)
        for slot in self.layout.scalars:
            values.append(0.0 if slot.parameter in created else float(slot.read(groups)))
        values.extend(tensor.read(groups) for tensor in self.layout.tensors)
        return values, created

    def keep_created_state(self, created: Created) -> None:
        """Give the optimizer the state that :meth:`gather` created."""
        for parameter, values in created.values():
            self.optimizer.state[parameter].update(values)
        self.created = created

    def undo_created_state(self) -> None:
        """Take back the optimizer state that the last call created, after its run raised."""
        for parameter, values in self.created.values():
            state = self.optimizer.state.get(parameter, {})
            if all(state.get(key) is value for key, value in values.items()):
                del self.optimizer.state[parameter]
        self.created = {}
