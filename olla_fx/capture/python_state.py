"""The Python values that a captured step read, and whether they are still what they were.

``dropout.p``, ``bn.momentum``, a loss's weight on a term, a layer in a list: tracing reads such values
once and bakes them. While capturing, every attribute that the model's and the loss's code reads from a
module is noted (:func:`olla_fx.torch_compat.attribute_reads`); only those are compared at each call, so
that a training loop may keep its own counters on the model. Values that no module holds and that are
read from elsewhere (global variables of the model's code, files, the environment) are not followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import other_libraries
from olla_fx.capture.pictures import function_values, is_atomic, picture_of, same

MODULE_TABLES = (
    frozenset(nn.Module().__dict__)
    | frozenset(fx.GraphModule(nn.Module(), fx.Graph()).__dict__)
    | {"_flat_weights", "_flat_weight_refs"}
)
"""Attributes by which modules and traced modules work; what they hold is looked up and compared by name."""

_NOT_WATCHED = MODULE_TABLES | other_libraries.HARMLESS_ATTRIBUTES
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Watched:
    """One attribute that was read: its module's table, and what it was."""

    label: str
    table: Mapping[str, Any]
    key: str
    value: object


@dataclass(frozen=True)
class PythonState:
    """The Python values that a step depends on.

    Attributes:
        atomic: attributes whose values can only be replaced.
        pictured: attributes whose values can change within, with their pictures.
        loss: what the loss function reads beside its arguments.
        loss_picture: its picture.
    """

    atomic: tuple[_Watched, ...]
    pictured: tuple[_Watched, ...]
    loss: object
    loss_picture: object

    @classmethod
    def of(
        cls,
        reads: Mapping[tuple[int, str], nn.Module],
        originals: Mapping[int, tuple[str, nn.Module]],
        known: frozenset[tuple[str, str]],
        loss_fn: object,
    ) -> PythonState:
        """Note what was read.

        Args:
            reads: module and attribute of every read while capturing.
            originals: for the id of each copied module, the original's name and the original. Others that
                were read, such as those that a loss function's closure holds, stand for themselves.
            known: owner and attribute of the tensors that are looked up at every call.
            loss_fn: the user's.
        """
        atomic, pictured = [], []
        for (identity, key), module in reads.items():
            foreign = identity not in originals
            if foreign and (isinstance(module, fx.GraphModule) or type(module) is nn.Module):
                continue  # tracing's own
            name, original = originals.get(identity, (type(module).__name__, module))
            if key.startswith("__") or key in _NOT_WATCHED or (name, key) in known:
                continue
            table = _table_with(original, key, foreign=foreign)
            value = table.get(key, _ABSENT)
            if isinstance(value, torch.Tensor) and torch_compat.module_hooks(original):
                continue  # weight_norm and spectral_norm recompute it in their hook at every call
            label = f"{name}.{key}" if name else key
            if value is _ABSENT or is_atomic(value):
                atomic.append(_Watched(label, table, key, value))
            else:
                pictured.append(_Watched(label, table, key, picture_of(value)))
        return cls(tuple(atomic), tuple(pictured), loss_fn, _loss_picture(loss_fn))

    def changed(self) -> str | None:
        """The name of a value that is no longer what it was; None while all are."""
        for each in self.atomic:
            present = each.table.get(each.key, _ABSENT)
            if present is not each.value and not same(each.value, present):
                return each.label
        pictures: dict[int, object] = {}
        for each in self.pictured:
            present = each.table.get(each.key, _ABSENT)
            # Many modules hold the same configuration object.
            if id(present) not in pictures:
                pictures[id(present)] = picture_of(present)
            if pictures[id(present)] != each.value:
                return each.label
        return "loss_fn" if _loss_picture(self.loss) != self.loss_picture else None


def _table_with(module: nn.Module, key: str, *, foreign: bool) -> Mapping[str, Any]:
    """The dictionary of a module that holds an attribute, its own one where none does."""
    if foreign and key not in module.__dict__:
        for table in (module._parameters, module._buffers, module._modules):
            if key in table:
                return table
    return module.__dict__


def _loss_picture(loss_fn: object) -> object:
    """What a loss function depends on; a module's attributes are watched one by one."""
    return picture_of(function_values(loss_fn) or loss_fn)
