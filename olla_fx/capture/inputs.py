"""Lists the tensors of a step's modules, each with every place it is tied to; holds inputs of other kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.errors import CaptureError
from olla_fx.guards import Role, TensorSlot


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the caller's inputs that is no tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class HeldNumber:
    """A Python number among the caller's inputs, in a dictionary in which a symbol may take its place."""

    held: Mapping[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.held[self.key]


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
