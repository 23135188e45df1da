"""An optimizer's update as part of a captured step.

The user's own ``step`` code is traced on a copy: an object of the same class whose groups hold the
traced parameters and whose hyper-parameters are *late-bound scalars*, numbers that become placeholders
of the graph instead of constants. A scheduler's change of ``lr`` therefore takes effect in the next
step without a new plan, and all arithmetic stays Python's and eager's.

``foreach`` and ``fused`` are captured as the single-tensor form, one update a parameter: the batched
form would keep every gradient alive until the last one exists.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.errors import UnsupportedOptimizerError
from olla_fx.guards import OptimizerLayout, ScalarSlot, TensorHyperparameter, TensorSpec

SUPPORTED: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)

_REFUSED = {
    "LBFGS": "it needs a closure that evaluates the model several times a step",
    "RAdam": "its arithmetic branches on the step number",
    "ASGD": "its arithmetic branches on the step number",
    "SparseAdam": "it needs sparse gradients",
}

# Python numbers in a group that choose code, not arithmetic.
_IMPLEMENTATION_FLAGS = frozenset({"foreach", "fused"})


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers whose update is not one fixed piece of arithmetic.

    Raises:
        UnsupportedOptimizerError: if it is not; names the reason and the optimizers that work.
    """
    name = type(optimizer).__name__
    supported = ", ".join(kind.__name__ for kind in SUPPORTED)
    step = torch_compat.optimizer_step_function(type(optimizer))
    known = any(
        isinstance(optimizer, kind) and step is torch_compat.optimizer_step_function(kind)
        for kind in SUPPORTED
    )
    if name in _REFUSED:
        raise UnsupportedOptimizerError(
            f"{name} cannot be captured: {_REFUSED[name]}. Use one of {supported}, or run it in eager"
        )
    if not known:
        raise UnsupportedOptimizerError(f"{name} is not an optimizer that can be captured: {supported}")
    if torch_compat.has_optimizer_pre_hooks(optimizer):
        raise UnsupportedOptimizerError(
            f"this {name} has step pre-hooks: in a captured step no gradients exist that they could see. "
            "Remove them, or do their work in loss_fn"
        )
    for group in optimizer.param_groups:
        on_cuda = all(parameter.is_cuda for parameter in group["params"])
        if group.get("differentiable") or (group.get("capturable") and not on_cuda):
            flag = "differentiable=True" if group.get("differentiable") else "capturable=True outside of CUDA"
            raise UnsupportedOptimizerError(f"{name} with {flag} cannot be captured; set it to False")
        for key in optimizer.defaults:
            # Only the arithmetic for CUDA graphs keeps to tensors; Rprop reads its first step as a number.
            keeps = key == "lr" and _is_capturable(group) and not isinstance(optimizer, torch.optim.Rprop)
            if isinstance(group.get(key), torch.Tensor) and not keeps:
                raise UnsupportedOptimizerError(
                    f"{name}'s {key} is a tensor; give it as a number: it takes effect without a new plan"
                )


def warn_about_fused(optimizer: torch.optim.Optimizer) -> None:
    """Say once that a fused kernel rounds differently from the form that is captured."""
    if any(group.get("fused") for group in optimizer.param_groups):
        warnings.warn(
            f"fused {type(optimizer).__name__} is captured as its single-tensor form, whose results can "
            "differ from the fused kernel's in the last bit",
            UserWarning,
            stacklevel=4,
        )


def parameter_names(
    optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]
) -> tuple[tuple[str, ...], ...]:
    """Return, for each group, the names of its parameters in the step's modules.

    Raises:
        UnsupportedOptimizerError: if a parameter is not the model's.
    """
    names: dict[int, str] = {}
    for owner, module in modules.items():
        for key, parameter in torch_compat.parameters_of(module).items():
            names.setdefault(id(parameter), f"{owner}.{key}" if owner else key)
    names_of_groups = []
    for index, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        stranger = next((parameter for parameter in parameters if id(parameter) not in names), None)
        if stranger is not None:
            raise UnsupportedOptimizerError(_about_stranger(index, stranger, optimizer, names))
        names_of_groups.append(tuple(names[id(parameter)] for parameter in parameters))
    return tuple(names_of_groups)


def _about_stranger(
    index: int, stranger: torch.Tensor, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> str:
    """Say that an optimizer holds what is no parameter of the model, and which of these it does not hold."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for parameter, name in names.items() if parameter not in held]
    named = ", ".join(missing[:2]) + (f" and {len(missing) - 2} more" if len(missing) > 2 else "")
    return (
        f"parameter group {index} holds a tensor of shape {list(stranger.shape)} that is no parameter of the "
        f"model{f', while no group holds {named}' if missing else ''}. After load_state_dict(assign=True), "
        "or if a layer was replaced or tied, an optimizer still has the old tensors, which eager would go on "
        "updating for nothing: put the model's parameters into its param_groups, or make it anew and plan "
        "with it, or load with assign=False"
    )


def describe(optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> OptimizerLayout:
    """Split an optimizer's hyper-parameters into late-bound scalars and constants.

    A number that is 0 is a constant, since optimizers leave code out for it (``weight_decay=0``): one
    that becomes or leaves 0 changes the layout, and with it the plan.
    """
    parameters = parameter_names(optimizer, modules)
    scalars: list[ScalarSlot] = []
    tensors: list[TensorHyperparameter] = []
    constants = []
    for index, group in enumerate(optimizer.param_groups):
        baked: list[tuple[str, Any]] = []
        for key in optimizer.defaults:
            if key in _IMPLEMENTATION_FLAGS or key not in group:
                continue
            if isinstance(group[key], torch.Tensor):
                spec = TensorSpec.of(group[key])
                tensors.append(TensorHyperparameter(f"group{index}.{key}", index, key, spec))
                continue
            # The arithmetic for CUDA graphs raises these numbers to powers that are tensors, which asks
            # whether they are 1; graphs would bake them anyway.
            baked_in = _is_capturable(group) and key != "lr"
            slots = [] if baked_in else _scalar_slots(optimizer, index, key, parameters[index])
            scalars.extend(slots)
            if not slots:
                baked.append((key, group[key]))
        constants.append(tuple(baked))
    return OptimizerLayout(parameters, tuple(scalars), tuple(constants), tuple(tensors))


def _scalar_slots(
    optimizer: torch.optim.Optimizer, index: int, key: str, names: Sequence[str]
) -> list[ScalarSlot]:
    group = optimizer.param_groups[index]
    value = group[key]
    if isinstance(value, tuple | list):
        numbers = all(_is_number(number) and number != 0 for number in value)
        elements = range(len(value)) if numbers else ()
        return [
            ScalarSlot(f"group{index}.{key}.{element}", index, key, element, positive=value[element] > 0)
            for element in elements
        ]
    if not _is_number(value) or value == 0:
        return []
    if key == "dampening":
        if group["momentum"] == 0:
            return []
        return [ScalarSlot(f"group{index}.{key}.{name}", index, key, None, name, value > 0) for name in names]
    return [ScalarSlot(f"group{index}.{key}", index, key, positive=value > 0)]


def _is_capturable(group: Mapping[str, Any]) -> bool:
    """Return True if a group's update keeps to tensors, as fused kernels do: they count steps there."""
    fused = group.get("fused") and all(parameter.is_cuda for parameter in group["params"])
    return bool(group.get("capturable") or (fused and "capturable" in group))


def _unfused(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group in the single-tensor form, with its state where the user's form has it."""
    chosen: dict[str, Any] = {"foreach": False, "fused": False}
    if "capturable" in group:
        chosen["capturable"] = _is_capturable(group)
    return {**group, **chosen}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def initial_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the state that the optimizer's first step would give a parameter.

    SGD's first step copies the gradient into the momentum buffer. A buffer of -0.0 gives the same bits,
    since ``-0.0 * momentum + g == g`` for every ``g`` with its sign (the dampening of a first step is
    passed as 0); +0.0 would turn gradients of -0.0 into +0.0.

    Args:
        optimizer: the user's; not changed.
        group: the parameter group that the parameter belongs to.
        parameter: real or fake; its values are not read.
    """
    if isinstance(optimizer, torch.optim.SGD):
        if group["momentum"] == 0:
            return {}
        return {"momentum_buffer": torch.full_like(parameter, -0.0, requires_grad=False)}
    stand_in = parameter.detach()
    stand_in.grad = stand_in.detach()
    alone = {**_unfused(group), "params": [stand_in]}
    copied = _copy_with(optimizer, [alone], {})
    torch_compat.initialize_optimizer_state(copied, alone)
    return dict(copied.state[stand_in])


def run_update(
    optimizer: torch.optim.Optimizer,
    layout: OptimizerLayout,
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor | None],
    state: Mapping[str, dict[str, torch.Tensor]],
    scalars: Mapping[str, Any],
) -> None:
    """Run the optimizer's own update on other tensors than its own.

    Args:
        optimizer: the user's; not changed.
        layout: from :func:`describe`.
        parameters: by name; updated in place.
        gradients: by name; parameters without one are skipped, as in eager.
        state: by parameter name, then key; updated in place.
        scalars: the late-bound numbers by name, concrete or symbolic, and hyper-parameters that are tensors.
    """
    groups: list[dict[str, Any]] = []
    for index, names in enumerate(layout.parameters):
        if not names:
            continue
        shared = _bind(optimizer.param_groups[index], index, layout.scalars, scalars, None)
        own = {slot.parameter for slot in layout.scalars if slot.group == index and slot.parameter}
        for batch in [[name] for name in names] if own else [list(names)]:
            bound = _bind(shared, index, layout.scalars, scalars, batch[0]) if own else shared
            tensors = {slot.key: scalars[slot.name] for slot in layout.tensors if slot.group == index}
            groups.append({**bound, **tensors, "params": [parameters[name] for name in batch]})
    keyed = {parameters[name]: values for name, values in state.items()}
    for name, gradient in gradients.items():
        parameters[name].grad = gradient
    try:
        step = torch_compat.optimizer_step_function(type(optimizer))
        with torch.no_grad():
            step(_copy_with(optimizer, groups, keyed))
    finally:
        for name in gradients:
            parameters[name].grad = None


def _bind(
    group: Mapping[str, Any],
    index: int,
    slots: Sequence[ScalarSlot],
    scalars: Mapping[str, Any],
    parameter: str | None,
) -> dict[str, Any]:
    """Copy a group with its late-bound numbers put in."""
    bound = _unfused(group)
    for slot in slots:
        if slot.group == index and slot.parameter == parameter:
            if slot.element is None:
                bound[slot.key] = scalars[slot.name]
            else:
                values = list(bound[slot.key])
                values[slot.element] = scalars[slot.name]
                bound[slot.key] = tuple(values)
    return bound


def _copy_with(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[torch.Tensor, dict[str, torch.Tensor]],
) -> torch.optim.Optimizer:
    """Make an object of the optimizer's class with other groups and state, and no hooks."""
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.__dict__.pop("step", None)
    copied.param_groups = groups
    copied.state = collections.defaultdict(dict, state)
    return copied
