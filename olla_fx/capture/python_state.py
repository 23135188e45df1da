"""The Python values that a captured step read, and whether they are still what they were.

``dropout.p``, ``bn.momentum``, a loss's weight on a term, a layer in a list: tracing reads such values
once and bakes them. While capturing, every attribute that the model's and the loss's code reads from a
module is noted (:func:`olla_fx.torch_compat.attribute_reads`); only those are compared at each call, so
that a training loop may keep its own counters on the model. Values that no module holds and that are
read from elsewhere (global variables of the model's code, files, the environment) are not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import other_libraries
from olla_fx.capture.pictures import (
    CONTAINERS,
    Glance,
    function_values,
    is_atomic,
    is_plain,
    picture_of,
    same,
)

MODULE_TABLES = (
    frozenset(nn.Module().__dict__)
    | frozenset(fx.GraphModule(nn.Module(), fx.Graph()).__dict__)
    | {"_flat_weights", "_flat_weight_refs"}
)
"""Attributes by which modules and traced modules work; what they hold is looked up and compared by name."""

_NOT_WATCHED = MODULE_TABLES | other_libraries.HARMLESS_ATTRIBUTES
_ABSENT = object()
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class _Watched:
    """One attribute that was read: its module, and what it was, as a picture or itself."""

    label: str
    module: nn.Module
    key: str
    value: object
    glance: Glance | None = None

    def present(self) -> object:
        """What the module has under this name now."""
        return _attribute(self.module, self.key)


_Column = tuple[Any, ...]
_dictionary_of = attrgetter("__dict__")
_tables_of = tuple(map(attrgetter, _TABLES))


@dataclass(frozen=True)
class _Glance:
    """The same attributes sorted by where they are found, so that most calls need one cheap look at each.

    In columns, since a look at hundreds of modules at every call is to be one loop in C for each question.

    Attributes:
        own: modules, keys and values of attributes in a module's own dictionary.
        inherited: modules, their classes, and the keys that each has of its class, or not at all.
        shared: class, key and value of what classes have.
        held: modules, tables, keys and values of parameters, buffers and children.
    """

    own: tuple[_Column, _Column, _Column]
    inherited: tuple[_Column, _Column, _Column]
    shared: tuple[tuple[type, str, object], ...]
    held: tuple[_Column, _Column, _Column, _Column]

    @classmethod
    def of(cls, watched: Sequence[_Watched]) -> _Glance:
        own, held = [], []
        inherited: dict[int, tuple[nn.Module, set[str]]] = {}
        shared: dict[tuple[type, str], object] = {}
        for each in watched:
            if each.key in each.module.__dict__:
                own.append((each.module, each.key, each.value))
                continue
            table = next((table for table in _TABLES if each.key in each.module.__dict__[table]), None)
            if table is not None:
                held.append((each.module, table, each.key, each.value))
            else:
                inherited.setdefault(id(each.module), (each.module, set()))[1].add(each.key)
                shared[type(each.module), each.key] = each.value
        of_class = [(module, type(module), frozenset(keys)) for module, keys in inherited.values()]
        return cls(
            _columns(own, 3),
            _columns(of_class, 3),
            tuple((kind, key, value) for (kind, key), value in shared.items()),
            _columns(held, 4),
        )

    def shows_change(self) -> bool:
        """Whether anything is another object than it was; it may still be equal."""
        return (
            self._shows_other_attributes()
            or self._shows_new_attributes()
            or any(_of_class(kind, key) is not value for kind, key, value in self.shared)
        )

    def _shows_other_attributes(self) -> bool:
        modules, keys, values = self.own
        present = map(dict.get, map(_dictionary_of, modules), keys, repeat(_ABSENT))
        if not all(map(is_, present, values)):
            return True
        modules, tables, keys, values = self.held
        return not all(map(is_, map(dict.get, map(getattr, modules, tables), keys), values))

    def _shows_new_attributes(self) -> bool:
        """Whether a module has another class, or of its own what it had of its class."""
        modules, kinds, keys = self.inherited
        if not all(map(is_, map(type, modules), kinds)):
            return True
        # A view of a dictionary looks the few keys up in it; a set would go through the whole dictionary.
        names = map(dict.keys, map(_dictionary_of, modules))
        return not all(map(_names_are_apart, names, keys)) or any(
            not all(map(frozenset.isdisjoint, keys, map(table_of, modules))) for table_of in _tables_of
        )


_names_are_apart: Callable[[Any, Any], bool] = type({}.keys()).isdisjoint


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> Any:
    return tuple(zip(*rows, strict=True)) if rows else ((),) * count


@dataclass(frozen=True)
class PythonState:
    """The Python values that a step depends on.

    Attributes:
        atomic: attributes whose values can only be replaced.
        glance: the same, for a quick look.
        pictured: attributes whose values can change within, with their pictures.
        loss: what the loss function reads beside its arguments.
        loss_picture: its picture.
    """

    atomic: tuple[_Watched, ...]
    glance: _Glance
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
        glances: dict[int, Glance | None] = {}
        for (identity, key), module in reads.items():
            foreign = identity not in originals
            if foreign and (isinstance(module, fx.GraphModule) or type(module) is nn.Module):
                continue  # tracing's own
            name, original = originals.get(identity, (type(module).__name__, module))
            if key.startswith("__") or key in _NOT_WATCHED or (name, key) in known:
                continue
            value = _attribute(original, key)
            if isinstance(value, torch.Tensor) and torch_compat.module_hooks(original):
                continue  # weight_norm and spectral_norm recompute it in their hook at every call
            label = f"{name}.{key}" if name else key
            if value is _ABSENT or is_atomic(value):
                atomic.append(_Watched(label, original, key, value))
            else:
                if id(value) not in glances:
                    glances[id(value)] = _glance_at(value)
                pictured.append(_Watched(label, original, key, picture_of(value), glances[id(value)]))
        return cls(tuple(atomic), _Glance.of(atomic), tuple(pictured), loss_fn, _loss_picture(loss_fn))

    def changed(self) -> str | None:
        """The name of a value that is no longer what it was; None while all are."""
        for each in self.atomic if self.glance.shows_change() else ():
            present = each.present()
            if present is not each.value and not same(each.value, present):
                return each.label
        # Many modules hold the same configuration object.
        pictures: dict[int, object] = {}
        glances: dict[Glance, bool] = {}
        for each in self.pictured:
            present = each.present()
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


def _attribute(module: nn.Module, key: str) -> object:
    """What reading an attribute of a module gives; ``_ABSENT`` for methods and other descriptors."""
    own = module.__dict__
    if key in own:
        return own[key]
    for table in _TABLES:
        if key in own.get(table, ()):
            return own[table][key]
    return _of_class(type(module), key)


def _of_class(kind: type, key: str) -> object:
    """What a class has under a name; ``_ABSENT`` for methods and other descriptors."""
    shared = getattr(kind, key, _ABSENT)
    return shared if isinstance(shared, CONTAINERS) or is_plain(shared) else _ABSENT


def _loss_picture(loss_fn: object) -> object:
    """What a loss function depends on; a module's attributes are watched one by one."""
    return picture_of(function_values(loss_fn) or loss_fn)
