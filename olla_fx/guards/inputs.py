"""The inputs of a captured step, and the place of each value at every call.

A step's graph has one placeholder for every tensor it reads: parameters, buffers, plain tensor
attributes, optimizer state, late-bound scalars and the caller's own tensors. They are found by name,
never held, so that ``load_state_dict(assign=True)``, ``.to()`` and ``optimizer.load_state_dict`` work
between calls.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards.snapshot import EVERY_FIELD, FieldsRead, leaves_within

Facts = Iterator[tuple[str, object]]
"""Guarded facts: for each a sentence, said if it changed, and a value that equals the planned one."""

WANTS_GRADIENT = (
    "requires a gradient, which a whole training step keeps for parameters only: pass it detached, or make "
    "it a parameter of the model"
)
"""The reason for which a training step refuses an input."""


class Mode(enum.StrEnum):
    """The part of a step that is captured."""

    INFERENCE = "inference"
    """Forward alone."""
    AUTOGRAD = "autograd"
    """Forward, and backward when the caller's own loop asks for it."""
    TRAINING = "training"
    """The whole step: forward, loss, backward and weight update."""


class Role(enum.StrEnum):
    """The source of a placeholder's value."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    STATE = "state"
    HYPERPARAMETER = "hyperparameter"
    SCALAR = "scalar"
    NUMBER = "number"
    """A Python number of the user's that is bound late."""
    EXAMPLE = "input"
    TANGENT = "tangent"
    GRADIENT = "gradient"
    """What micro-batches add to and the update reads; no input of the user's."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Everything about a tensor that a plan depends on.

    Attributes:
        shape: extents.
        stride: element strides.
        dtype: element type.
        device: where it lives.
        requires_grad: True if a gradient is wanted; part of the plan for parameters only.
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
        """Return True if a tensor has this shape, layout, type and device."""
        return (
            tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and tensor.stride() == self.stride
            and tensor.device == self.device
            and not tensor.is_neg()
            and not tensor.is_conj()
        )

    @property
    def overlaps_itself(self) -> bool:
        """True if several elements may lie in one place, as those of an expanded tensor."""
        end = 0
        dimensions = zip(self.stride, self.shape, strict=True)
        for step, extent in sorted(dimensions) if 0 not in self.shape else ():
            if extent > 1 and step <= end:
                return True
            end += step * (extent - 1)
        return False

    def empty(self, *, meta_as: torch.device) -> torch.Tensor:
        """Return a new tensor of this shape and layout in its own storage; a meta one on ``meta_as``."""
        device = meta_as if self.device.type == "meta" else self.device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        """Return text such as ``float32[8, 3, 64, 64] on cpu``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


@dataclass(frozen=True, slots=True)
class StepInput:
    """One placeholder of a captured step.

    Attributes:
        role: where its value comes from.
        name: unique within its role, such as ``layer1.0.conv1.weight`` or ``group0.lr``.
        spec: the tensor it was planned for; None for scalars and numbers.
        batch: of an input that is cut into micro-batches, the whole tensor; None for all others.
        number: of a number, one with which the graph can be run.
    """

    role: Role
    name: str
    spec: TensorSpec | None
    batch: TensorSpec | None = None
    number: float = 0.5

    def stand_in(self, meta_as: torch.device) -> Any:
        """Return a new value of this kind: of a micro-batch a batch's first part, of a number the number.

        Args:
            meta_as: the device for a tensor that is planned on the meta device.
        """
        if self.spec is None:
            return self.number
        if self.batch is None:
            return self.spec.empty(meta_as=meta_as)
        return self.batch.empty(meta_as=meta_as)[: self.spec.shape[0]]


_TABLE_NAMES = {Role.PARAMETER: "_parameters", Role.BUFFER: "_buffers"}


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A place in a module tree that holds a tensor: ``table[key]``.

    Attributes:
        role: parameter, buffer or attribute.
        name: dotted path; the first one if a tensor is tied to several places.
        owner: the dotted path of the module, for finding the same place in a copy.
        key: the attribute's name.
    """

    role: Role
    name: str
    owner: str
    key: str

    @property
    def table_name(self) -> str:
        """The attribute under which a module has the dictionary that holds the tensor."""
        return _TABLE_NAMES.get(self.role, "__dict__")

    def table(self, module: nn.Module) -> dict[str, Any]:
        """Return the dictionary of ``module`` (the one at ``owner``) that holds the tensor."""
        table: dict[str, Any] = getattr(module, self.table_name)
        return table


def step_modules(model: nn.Module, loss_fn: object, fields: FieldsRead = EVERY_FIELD) -> dict[str, nn.Module]:
    """Return all modules of a step by name: the model's by their paths, then those within its loss.

    Args:
        model: the model.
        loss_fn: a loss module, an object or a bound method that holds modules, any function, or None.
        fields: what counts of objects.
    """
    modules = dict(model.named_modules())
    known = set(modules.values())
    tables = {id(torch_compat.children_of(module)) for module in known}
    prefix = "loss_fn"
    while prefix in modules:
        prefix += "_"
    for path, leaf in leaves_within(loss_fn, prefix, fields=fields):
        # A planned module stands for the model, whose tables it shares.
        if isinstance(leaf, nn.Module) and id(torch_compat.children_of(leaf)) not in tables:
            modules.update(leaf.named_modules(known, path))
    return modules
