"""Takes snapshots of Python values: immutable descriptions that compare equal if nothing changed.

A captured step bakes the Python values that its code read. The snapshot of such a value, taken when
capturing, equals a later one exactly if nothing in reach changed. Objects are looked into a few levels
deep; functions, classes and modules are told apart by identity, numbers by their bits. Of objects whose
classes told what was read of them (:data:`FieldsRead`), the fields that were read are all that counts.
"""

from __future__ import annotations

import collections
import functools
import logging
import pickle
import random
import types
import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from olla_fx import torch_compat
from olla_fx.guards import other_libraries

DEEPEST = 4
"""How deep objects are looked into."""
_LONGEST_LIST = 64
_LARGEST_ARRAY_BYTES = 1 << 16
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, np.generic)
"""Types whose values are compared, not their identities."""
_COMPARED_AS_THEY_ARE = frozenset(PLAIN) - {float, complex, np.generic}
CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
"""Types whose elements a snapshot includes."""

_BY_IDENTITY = (
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    logging.Logger,
    torch.Tensor,
    *torch_compat.OPERATOR_TYPES,
    *weakref.ProxyTypes,
)
_WITHOUT_PARTS: tuple[Any, ...] = (*PLAIN, *_BY_IDENTITY)


FieldsRead = Mapping[type, tuple[str, ...]]
"""The names of what traced code read from objects, by the objects' class; every field counts of others."""

EVERY_FIELD: FieldsRead = MappingProxyType({})
"""Of no class it is known what was read."""

NOTHING = object()
"""Stands for a field that an object does not have."""


@dataclass(frozen=True, eq=False, slots=True)
class Same:
    """The snapshot of an object by identity alone; keeps it alive, so that its identity is not reused."""

    value: object

    def __eq__(self, other: object) -> bool:
        """Return True for a snapshot of the very same object."""
        return isinstance(other, Same) and self.value is other.value


def is_immutable(value: object) -> bool:
    """Return True if a value changes only by being replaced, as far as a snapshot can tell."""
    if isinstance(value, tuple):
        return all(isinstance(element, PLAIN) for element in value)
    return isinstance(value, _WITHOUT_PARTS)


def snapshot_of(
    value: Any,
    *,
    versions: bool = False,
    depth: int = 0,
    without: frozenset[tuple[int, Any]] = frozenset(),
    fields: FieldsRead = EVERY_FIELD,
    within: tuple[int, ...] = (),
) -> object:
    """Return a description that differs if the object was changed.

    Args:
        value: anything.
        versions: True if writing to a tensor counts as a change, not only replacing it.
        depth: the depth at which the value was reached, by steps out of objects of which every field counts.
        without: identity of an object and name in it of each part that may change.
        fields: what counts of objects.
        within: identities of the other objects by which the value was reached.
    """
    kind = type(value)
    if kind in _COMPARED_AS_THEY_ARE:
        return kind, value
    # The value's own ``__class__`` is not asked: transformers' config objects look it up in Python.
    if issubclass(kind, PLAIN):  # 0.0 == -0.0, and nan != nan
        return kind, value.tobytes() if issubclass(kind, np.generic) else repr(value)
    if issubclass(kind, torch_compat.SYMBOLIC):
        return Same(value)
    if issubclass(kind, torch.Tensor):
        return Same(value), torch_compat.version_of(value) if versions else 0
    if issubclass(kind, np.ndarray) and value.nbytes <= _LARGEST_ARRAY_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    if issubclass(kind, _GENERATORS):
        return kind, _generator_state(value)
    if (depth >= DEEPEST and kind not in fields) or id(value) in within or issubclass(kind, _WITHOUT_PARTS):
        return Same(value)
    parts = parts_of(value, fields)
    if parts is None and issubclass(kind, Iterator):
        parts = _iterator_parts(value)
    if parts is None:
        return Same(value)
    if without:
        parts = [(name, None if (id(value), name) in without else part) for name, part in parts]
    depth, within = one_step(value, depth, within, fields)
    return kind, [
        (name, type(part), part)
        if type(part) in _COMPARED_AS_THEY_ARE  # most parts are, and a call takes longer
        else (
            name,
            snapshot_of(part, versions=versions, depth=depth, without=without, fields=fields, within=within),
        )
        for name, part in parts
    ]


def one_step(
    value: object, depth: int, within: tuple[int, ...], fields: FieldsRead
) -> tuple[int, tuple[int, ...]]:
    """Return depth and objects by which the parts of a value are reached.

    The depth keeps a snapshot small. What was read leads no further than the code went, but in circles.

    Args:
        value: anything.
        depth: as of :func:`snapshot_of`.
        within: likewise.
        fields: likewise.
    """
    return (depth, (*within, id(value))) if type(value) in fields else (depth + 1, within)


def leaves_within(
    value: object,
    path: str = "",
    depth: int = 0,
    fields: FieldsRead = EVERY_FIELD,
    within: tuple[int, ...] = (),
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and modules in reach of a value, each after its dotted path.

    Args:
        value: anything.
        path: to the value.
        depth: as of :func:`snapshot_of`.
        fields: likewise.
        within: likewise.
    """
    if isinstance(value, torch.Tensor | nn.Module):
        yield path, value
        return
    if (depth >= DEEPEST and type(value) not in fields) or id(value) in within:
        return
    depth, within = one_step(value, depth, within, fields)
    for name, part in parts_of(value, fields) or ():
        yield from leaves_within(part, f"{path}.{name}" if path else str(name), depth, fields, within)


def parts_of(value: Any, fields: FieldsRead = EVERY_FIELD) -> list[tuple[Any, Any]] | None:
    """Return an object's parts, each after its name or index; None if it is not looked into.

    Args:
        value: anything.
        fields: what counts of objects.
    """
    kind: Any = type(value)
    if kind in fields:
        read = ((name, stored(value, name), class_value(kind, name)) for name in fields[kind])
        parts = ((name, shared if own is NOTHING else own) for name, own, shared in read)
        return [(name, part) for name, part in parts if part is not NOTHING]
    if issubclass(kind, _WITHOUT_PARTS):
        return None
    if issubclass(kind, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if issubclass(kind, functools.partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if issubclass(kind, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if issubclass(kind, CONTAINERS):
        return list(enumerate(value))
    slots = [(name, getattr(value, name)) for name in _slot_names(kind) if hasattr(value, name)]
    if not hasattr(value, "__dict__"):
        return slots or None
    return [*slots, *other_libraries.fields_of(value).items()]


def stored(value: Any, name: str) -> Any:
    """Return what an object itself keeps under a name; :data:`NOTHING` if it keeps nothing.

    Args:
        value: an object whose class is of Python and looks attributes up as ``object`` does.
        name: of the field.
    """
    own = value.__dict__ if hasattr(value, "__dict__") else {}
    if name in own:
        return own[name]
    kind: Any = type(value)
    return getattr(value, name, NOTHING) if name in _slot_names(kind) else NOTHING


def class_value(kind: type, name: str) -> Any:
    """Return a value that the instances of a class share; :data:`NOTHING` for methods and the like."""
    for base in kind.__mro__:
        if name in base.__dict__:
            value = base.__dict__[name]
            return value if isinstance(value, (*PLAIN, *CONTAINERS)) else NOTHING
    return NOTHING


def steps_of(value: Any, fields: FieldsRead = EVERY_FIELD) -> list[tuple[tuple[str, Any], Any]] | None:
    """Return the parts of an object whose numbers may be replaced, each after the step that leads to it.

    Args:
        value: anything.
        fields: what counts of objects.

    Returns:
        For each part ``field`` of the object's ``__dict__``, ``item`` or ``attribute``, with its name; None
        if the object is not of such a kind.
    """
    kind: Any = type(value)
    if kind in fields:
        own = value.__dict__ if hasattr(value, "__dict__") else {}
        parts = parts_of(value, fields) or ()
        return [(("field" if name in own else "attribute", name), part) for name, part in parts]
    if issubclass(kind, _WITHOUT_PARTS):
        return None
    if issubclass(kind, types.MethodType):
        return [(("attribute", "__self__"), value.__self__), (("attribute", "__func__"), value.__func__)]
    if issubclass(kind, dict):
        return [(("item", key), part) for key, part in value.items()] if all(map(_is_name, value)) else None
    if kind is list:
        return (
            [(("item", index), part) for index, part in enumerate(value)]
            if len(value) <= _LONGEST_LIST
            else None
        )
    if issubclass(kind, (*CONTAINERS, Mapping, Iterator, functools.partial, np.ndarray, *_GENERATORS)):
        return None
    if _slot_names(kind) or not hasattr(value, "__dict__"):
        return None
    return [(("field", name), part) for name, part in other_libraries.fields_of(value).items()]


def _is_name(key: object) -> bool:
    return type(key) is str


@functools.lru_cache(maxsize=1024)
def _slot_names(kind: Hashable) -> tuple[str, ...]:
    """Return the names that a class and its bases declare in ``__slots__``, private ones as they are kept."""
    slots: list[str] = []
    for base in kind.__mro__ if isinstance(kind, type) else ():
        names = base.__dict__.get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            slots.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in slots if name not in ("__dict__", "__weakref__"))


def _generator_state(generator: Any) -> bytes:
    """Return the state of a generator of random numbers."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes())
    return pickle.dumps(generator)


def _iterator_parts(iterator: Iterator[object]) -> list[tuple[object, object]]:
    """Return what copying an iterator would copy, which advancing it changes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = iterator.__reduce__()
    except TypeError:  # not copyable
        return [("text", repr(iterator))]
    return list(enumerate(reduced)) if isinstance(reduced, tuple) else [("text", repr(iterator))]
