"""What flows into a captured step, and where each of it is looked up at every call.

A step's graph has one placeholder for every tensor it reads: parameters, buffers, plain tensor
attributes, optimizer state, late-bound scalars and the caller's own tensors. They are found by name,
never held, so that ``load_state_dict(assign=True)``, ``.to()`` and ``optimizer.load_state_dict`` work
between calls.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.capture.pictures import leaves_within
from olla_fx.errors import CaptureError

WANTS_GRADIENT = (
    "requires a gradient, which a whole training step keeps for parameters only: pass it detached, or make "
    "it a parameter of the model"
)
"""Why a training step refuses an input."""


class Role(enum.StrEnum):
    """Where the value of a placeholder comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    STATE = "state"
    HYPERPARAMETER = "hyperparameter"
    SCALAR = "scalar"
    EXAMPLE = "input"
    TANGENT = "tangent"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """All of a tensor that a plan depends on.

    Attributes:
        shape: extents.
        stride: element strides.
        dtype: element type.
        device: where it lives.
        requires_grad: whether a gradient is wanted; part of the plan for parameters only.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this shape, layout, type and device."""
        return (
            tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and tensor.stride() == self.stride
            and tensor.device == self.device
            and not tensor.is_neg()
            and not tensor.is_conj()
        )

    @property
    def last_offset(self) -> int:
        """How many elements after the first the last one lies; 0 where there is none."""
        if 0 in self.shape:
            return 0
        return sum((extent - 1) * step for extent, step in zip(self.shape, self.stride, strict=True))

    @property
    def overlaps_itself(self) -> bool:
        """Whether several elements may lie in one place, as those of an expanded tensor."""
        end = 0
        dimensions = zip(self.stride, self.shape, strict=True)
        for step, extent in sorted(dimensions) if 0 not in self.shape else ():
            if extent > 1 and step <= end:
                return True
            end += step * (extent - 1)
        return False

    def empty(self, *, meta_as: torch.device) -> torch.Tensor:
        """A new tensor of this shape and layout in a storage of its own; a meta one on ``meta_as``."""
        device = meta_as if self.device.type == "meta" else self.device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        """Such as ``float32[8, 3, 64, 64] on cpu``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


@dataclass(frozen=True, slots=True)
class StepInput:
    """One placeholder of a captured step.

    Attributes:
        role: where its value comes from.
        name: unique within its role, such as ``layer1.0.conv1.weight`` or ``group0.lr``.
        spec: the tensor it was planned for; None for scalars.
    """

    role: Role
    name: str
    spec: TensorSpec | None


_TABLE_NAMES = {Role.PARAMETER: "_parameters", Role.BUFFER: "_buffers"}


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A place in a module tree that holds a tensor: ``table[key]``.

    Attributes:
        role: parameter, buffer or attribute.
        name: dotted path, the first one where a tensor is tied to several places.
        owner: the dotted path of the module, for finding the same place in a copy.
        key: the attribute's name.
    """

    role: Role
    name: str
    owner: str
    key: str

    @property
    def table_name(self) -> str:
        """Under which name a module has the dictionary in which the tensor is kept."""
        return _TABLE_NAMES.get(self.role, "__dict__")

    def table(self, module: nn.Module) -> dict[str, Any]:
        """The dictionary of ``module`` (the one at ``owner``) in which the tensor is kept."""
        table: dict[str, Any] = getattr(module, self.table_name)
        return table


def step_modules(model: nn.Module, loss_fn: object) -> dict[str, nn.Module]:
    """All modules of a step by name: the model's by their paths, then those within its loss.

    Args:
        model: the model.
        loss_fn: a loss module, an object or a bound method that holds modules, any function, or None.
    """
    modules = dict(model.named_modules())
    known = set(modules.values())
    prefix = "loss_fn"
    while prefix in modules:
        prefix += "_"
    for path, root in modules_within(loss_fn, prefix):
        modules.update(root.named_modules(known, path))
    return modules


def modules_within(loss_fn: object, prefix: str = "loss_fn") -> list[tuple[str, nn.Module]]:
    """The modules that a loss is or holds, without those within them; each with its path."""
    return [(path, root) for path, root in leaves_within(loss_fn, prefix) if isinstance(root, nn.Module)]


def tensor_slots(modules: Mapping[str, nn.Module]) -> list[list[TensorSlot]]:
    """All tensors of a step's modules, each with every place it is tied to.

    Args:
        modules: from :func:`step_modules`.

    Returns:
        One list a tensor, in the order parameters, buffers, plain attributes.

    Raises:
        CaptureError: when two different tensors share one storage, or a parameter is not initialised.
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
