"""Attributes of modules that a captured step read, and a quick look at whether they are what they were.

Python finds an attribute in the class if it is a data descriptor there (a property), then in the module's own
dictionary, in the class, and last, through ``nn.Module.__getattr__``, among parameters, buffers and children.
Something new in an earlier place hides what was found in a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

from torch import nn

from olla_fx.capture.pictures import CONTAINERS, Glance

ABSENT = object()
"""In the place of an attribute that is not there."""

IN_CLASS = "class"
_OWN = "__dict__"
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Watched:
    """One attribute that was read: its module, and what it was, as a picture or itself."""

    label: str
    module: nn.Module
    key: str
    value: object
    glance: Glance | None = None

    def present(self) -> object:
        """What the module has under this name now."""
        return find(self.module, self.key)[1]


def find(module: nn.Module, key: str) -> tuple[str, object]:
    """Where an attribute of a module is found, and what; a descriptor is not asked for its value."""
    of_class = _of_class(type(module), key)
    own = module.__dict__
    if key in own and not hasattr(type(of_class), "__set__"):
        return _OWN, own[key]
    if of_class is not ABSENT:
        return IN_CLASS, of_class
    for table in _TABLES:
        if key in own.get(table, ()):
            return table, own[table][key]
    return "", ABSENT


def place(module: nn.Module, key: str) -> tuple[str, object]:
    """Where an attribute is found, whatever it is there; in a class also what, if no container."""
    where, value = find(module, key)
    return where, value if where == IN_CLASS and not isinstance(value, CONTAINERS) else None


def _of_class(kind: type, key: str) -> object:
    for each in kind.__mro__:
        if key in each.__dict__:
            return each.__dict__[key]
    return ABSENT


_Column = tuple[Any, ...]
_dictionary_of = attrgetter(_OWN)
_tables_of = tuple(map(attrgetter, _TABLES))
_names_are_apart: Callable[[Any, Any], bool] = type({}.keys()).isdisjoint


class AttributesGlance:
    """Attributes sorted by where they are found, so that most calls need one cheap look at each.

    In columns, since a look at hundreds of modules at every call is to be one loop in C for each question.
    """

    def __init__(self, watched: Sequence[Watched], placed: Sequence[Watched]) -> None:
        """Remember what there is.

        Args:
            watched: attributes of which the very values are looked at.
            placed: those of which only the places are.
        """
        self._watched = tuple(watched)
        self._placed = tuple(placed)
        self.remember()

    def remember(self) -> None:
        """Take what is there now for what is wanted, as a close look has shown."""
        own, held = [], []
        for each in self._watched:
            where, value = find(each.module, each.key)
            if where == _OWN:
                own.append((each.module, each.key, value))
            elif where in _TABLES:
                held.append((each.module, where, each.key, value))
        self._own = _columns(own, 3)
        self._held = _columns(held, 4)
        self._remember_absent()
        self._remember_classes()

    def _remember_absent(self) -> None:
        """For each module its class, the names that are not in its dictionary, and those that are nowhere."""
        names: dict[int, tuple[nn.Module, set[str], set[str]]] = {}
        for each in (*self._watched, *self._placed):
            where, _ = find(each.module, each.key)
            _, not_own, nowhere = names.setdefault(id(each.module), (each.module, set(), set()))
            if each.key not in each.module.__dict__:
                not_own.add(each.key)
            if not where:
                nowhere.add(each.key)
        not_own_rows = [(module, type(module), frozenset(not_own)) for module, not_own, _ in names.values()]
        nowhere_rows = [(module, frozenset(nowhere)) for module, _, nowhere in names.values() if nowhere]
        self._not_own = _columns(not_own_rows, 3)
        self._nowhere = _columns(nowhere_rows, 2)

    def _remember_classes(self) -> None:
        """For each class what its dictionary has, and the names that it has not."""
        names: dict[type, set[str]] = {}
        for each in (*self._watched, *self._placed):
            for kind in type(each.module).__mro__:
                names.setdefault(kind, set()).add(each.key)
        there = [
            (kind.__dict__, key, kind.__dict__[key])
            for kind, keys in names.items()
            for key in keys
            if key in kind.__dict__
        ]
        lacking = [
            (kind.__dict__.keys(), frozenset(keys - kind.__dict__.keys())) for kind, keys in names.items()
        ]
        self._class_entries = _columns(there, 3)
        self._class_names = _columns(lacking, 2)

    def shows_change(self) -> bool:
        """Whether anything is another object than it was, or elsewhere; it may still be equal."""
        return self._shows_other_attributes() or self._shows_new_attributes() or self._shows_other_classes()

    def _shows_other_attributes(self) -> bool:
        modules, keys, values = self._own
        present = map(dict.get, map(_dictionary_of, modules), keys, repeat(ABSENT))
        if not all(map(is_, present, values)):
            return True
        modules, tables, keys, values = self._held
        return not all(map(is_, map(dict.get, map(getattr, modules, tables), keys, repeat(ABSENT)), values))

    def _shows_new_attributes(self) -> bool:
        """Whether a module has another class, or of its own what it had elsewhere or not at all."""
        modules, kinds, not_own = self._not_own
        if not all(map(is_, map(type, modules), kinds)):
            return True
        # A view of a dictionary looks the few keys up in it; a set would go through the whole dictionary.
        names = map(dict.keys, map(_dictionary_of, modules))
        if not all(map(_names_are_apart, names, not_own)):
            return True
        modules, nowhere = self._nowhere
        return any(
            not all(map(frozenset.isdisjoint, nowhere, map(table_of, modules))) for table_of in _tables_of
        )

    def _shows_other_classes(self) -> bool:
        dictionaries, keys, values = self._class_entries
        if not all(map(is_, map(MappingProxyType.get, dictionaries, keys, repeat(ABSENT)), values)):
            return True
        return not all(map(_names_are_apart, *self._class_names))


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> tuple[_Column, ...]:
    return tuple(zip(*rows, strict=True)) if rows else ((),) * count
