"""Lists the tensors of a step's modules, each with every place it is tied to; holds inputs of other kinds.

A model is called with inputs in sequence and by name. What its forward takes in sequence is put in its place
there, however it was given, so that both ways of calling are one kind; the rest follows as one dictionary,
:class:`NamedInputs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.errors import CaptureError, StepInputError
from olla_fx.guards import Role, TensorSlot
from olla_fx.torch_compat import pytree


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the caller's inputs that is no tensor."""

    value: Any


class NamedInputs(dict[str, Any]):
    """The inputs that a model takes by name only; the last one of its inputs if there are any."""


def _flatten_named(named: NamedInputs) -> tuple[list[Any], list[str]]:
    return list(named.values()), list(named)


def _unflatten_named(values: Iterable[Any], names: Sequence[str]) -> NamedInputs:
    return NamedInputs(zip(names, values, strict=True))


pytree.register_pytree_node(NamedInputs, _flatten_named, _unflatten_named)


def call_with(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call a model.

    Args:
        function: the model.
        inputs: those in sequence, and :class:`NamedInputs` at the end if there are any.
    """
    if inputs and type(inputs[-1]) is NamedInputs:
        return function(*inputs[:-1], **inputs[-1])
    return function(*inputs)


def in_sequence(model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return inputs in the places where the model's forward takes them, those that have none at the end.

    Args:
        model: the user's.
        inputs: those given in sequence.
        named: those given by name.

    Raises:
        StepInputError: if the model does not take them so.
    """
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*inputs, **named)
    except TypeError as error:
        raise StepInputError(f"{type(model).__name__}.forward: {error}") from error
    given = set(bound.arguments)
    bound.apply_defaults()
    names = list(bound.arguments)[: len(bound.args)]
    last = max((index for index, name in enumerate(names) if name in given), default=-1)
    by_name = {
        name: value
        for name, value in bound.kwargs.items()
        if name in given or name not in signature.parameters
    }
    sequence = bound.args[: max(last + 1, len(inputs))]
    return (*sequence, NamedInputs(sorted(by_name.items()))) if by_name else sequence


def takes_by_name(model: nn.Module, named: Mapping[Any, Any]) -> bool:
    """Return True if a dictionary is one of inputs by name, not an input: forward takes at least one so.

    Args:
        model: the user's.
        named: an example.
    """
    parameters = inspect.signature(model.forward).parameters
    if not all(isinstance(name, str) for name in named) or parameters.keys().isdisjoint(named):
        return False
    try:
        in_sequence(model, (), named)
    except StepInputError:
        return False
    return True


def tensor_slots(modules: Mapping[str, nn.Module]) -> list[list[TensorSlot]]:
    """Return all tensors of a step's modules, each with every place it is tied to.

    Args:
        modules: from :func:`olla_fx.guards.step_modules`.

    Returns:
        One list for each tensor, in the order parameters, buffers, plain attributes.

    Raises:
        CaptureError: if two different tensors share one storage, or a parameter is not initialised.
    """
    tied: dict[int, list[TensorSlot]] = {}
    storages: dict[int, str] = {}
    for role in (Role.PARAMETER, Role.BUFFER, Role.ATTRIBUTE):
        for slot, tensor in _slots_of(modules, role):
            places = tied.setdefault(id(tensor), [])
            places.append(slot)
            if len(places) == 1:
                _refuse_shared_storage(slot.name, tensor, storages, modules[slot.owner])
    return list(tied.values())


def _slots_of(modules: Mapping[str, nn.Module], role: Role) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
    for owner, module in modules.items():
        if role is Role.ATTRIBUTE and torch_compat.module_hooks(module):
            continue  # weight_norm and spectral_norm recompute such a tensor in their hook at every call
        probe = TensorSlot(role, "", owner, "")
        for key, tensor in probe.table(module).items():
            if isinstance(tensor, torch.Tensor):
                name = f"{owner}.{key}" if owner else key
                if isinstance(tensor, torch_compat.UNINITIALIZED):
                    raise CaptureError(
                        f"{name} is not initialised yet (a lazy module): call the model once on data, "
                        "then plan it"
                    )
                yield TensorSlot(role, name, owner, key), tensor


def _refuse_shared_storage(
    name: str, tensor: torch.Tensor, storages: dict[int, str], owner: nn.Module
) -> None:
    if tensor.is_meta or tensor.numel() == 0:
        return
    first = storages.setdefault(torch_compat.storage_key(tensor), name)
    if first != name:
        way_out = "Tie them as one parameter, or clone one of them"
        if isinstance(owner, nn.RNNBase):
            way_out = (
                "That is how cuDNN wants recurrent layers: move the model there, plan and call it within "
                "torch.backends.cudnn.flags(enabled=False), by which PyTorch's own kernels run it"
            )
        raise CaptureError(
            f"{first} and {name} are different tensors in one storage; a captured step cannot follow "
            f"updates through it. {way_out}"
        )
