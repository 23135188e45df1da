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

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import other_libraries
from olla_fx.capture.pictures import (
    CONTAINERS,
    Glance,
    function_values,
    is_atomic,
    picture_of,
    same,
)
from olla_fx.capture.watched import ABSENT, IN_CLASS, AttributesGlance, Watched, find, place

MODULE_TABLES = (
    frozenset(nn.Module().__dict__)
    | frozenset(fx.GraphModule(nn.Module(), fx.Graph()).__dict__)
    | {"_flat_weights", "_flat_weight_refs"}
)
"""Attributes by which modules and traced modules work; what they hold is looked up and compared by name."""

_NOT_WATCHED = MODULE_TABLES | other_libraries.HARMLESS_ATTRIBUTES


@dataclass(frozen=True)
class PythonState:
    """The Python values that a step depends on.

    Attributes:
        atomic: attributes whose values can only be replaced.
        pictured: attributes whose values can change within, with their pictures.
        placed: where these, and the tensors that are looked up at every call, were found.
        kinds: the classes of all modules that were read from, by the modules' names.
        glance: a quick look at all of it but what changes within.
        loss: what the loss function reads beside its arguments.
        loss_picture: its picture.
    """

    atomic: tuple[Watched, ...]
    pictured: tuple[Watched, ...]
    placed: tuple[Watched, ...]
    kinds: tuple[tuple[str, nn.Module, type], ...]
    glance: AttributesGlance
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
        atomic, pictured, placed = [], [], []
        kinds: dict[int, tuple[str, nn.Module, type]] = {}
        glances: dict[int, Glance | None] = {}
        for (identity, key), module in reads.items():
            foreign = identity not in originals
            if foreign and (isinstance(module, fx.GraphModule) or type(module) is nn.Module):
                continue  # tracing's own
            name, original = originals.get(identity, (type(module).__name__, module))
            if key.startswith("__") or key in _NOT_WATCHED:
                continue
            kinds.setdefault(id(original), (name or type(original).__name__, original, type(original)))
            label = f"{name}.{key}" if name else key
            where, value = find(original, key)
            if (name, key) in known:
                placed.append(Watched(label, original, key, place(original, key)))
                continue
            if isinstance(value, torch.Tensor) and torch_compat.module_hooks(original):
                continue  # weight_norm and spectral_norm recompute it in their hook at every call
            of_class = where == IN_CLASS and not isinstance(value, CONTAINERS)
            if value is ABSENT or of_class or is_atomic(value):
                atomic.append(Watched(label, original, key, value))
                continue
            if id(value) not in glances:
                glances[id(value)] = _glance_at(value)
            pictured.append(Watched(label, original, key, picture_of(value), glances[id(value)]))
            placed.append(Watched(label, original, key, place(original, key)))
        glance = AttributesGlance(atomic, placed)
        picture = _loss_picture(loss_fn)
        parts = tuple(atomic), tuple(pictured), tuple(placed), tuple(kinds.values())
        return cls(*parts, glance, loss_fn, picture)

    def changed(self) -> str | None:
        """The name of a value that is no longer what it was; None while all are."""
        if self.glance.shows_change():
            replaced = self._replaced()
            if replaced is not None:
                return replaced
            self.glance.remember()
        return self._changed_within()

    def _replaced(self) -> str | None:
        for name, module, kind in self.kinds:
            if type(module) is not kind:
                return f"the class of {name}"
        for each in self.placed:
            if place(each.module, each.key) != each.value:
                return each.label
        for each in self.atomic:
            if not same(each.value, each.present()):
                return each.label
        return None

    def _changed_within(self) -> str | None:
        # Many modules hold the same configuration object.
        pictures: dict[int, object] = {}
        glances: dict[Glance, bool] = {}
        for each in self.pictured:
            own = each.module.__dict__
            present = own[each.key] if each.key in own else each.present()
            glance = each.glance
            if glance is not None and glance.value is present:
                if glance not in glances:
                    glances[glance] = glance.is_unchanged()
                if glances[glance]:
                    continue
            if id(present) not in pictures:
                pictures[id(present)] = picture_of(present)
            if pictures[id(present)] != each.value:
                return each.label
        return "loss_fn" if _loss_picture(self.loss) != self.loss_picture else None


def _glance_at(value: object) -> Glance | None:
    try:
        return Glance(value)
    except LookupError:
        return None


def _loss_picture(loss_fn: object) -> object:
    """What a loss function depends on; a module's attributes are watched one by one."""
    return picture_of(function_values(loss_fn) or loss_fn)
