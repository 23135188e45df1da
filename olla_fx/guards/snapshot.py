"""Takes snapshots of Python values: immutable descriptions that compare equal if nothing changed.

A captured step bakes the Python values that its code read. The snapshot of such a value, taken when
capturing, equals a later one exactly if nothing in reach changed. Objects are looked into a few levels
deep; functions, classes and modules are told apart by identity, numbers by their bits.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import pickle
import random
import types
import warnings
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from olla_fx import torch_compat

_DEEPEST = 4
_LARGEST_ARRAY_BYTES = 1 << 16
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_COMPARED_AS_THEY_ARE = frozenset(_PLAIN) - {float, complex, np.generic}
_COMPARED_BY_BITS = (float, complex, np.generic)  # 0.0 == -0.0, and nan != nan
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
)
_OF_PARTS = (types.MethodType, functools.partial, np.ndarray, *_GENERATORS)


class _Same:
    """The snapshot of an object by identity; keeps it alive, so that its identity is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def same(value: object) -> object:
    """Return a snapshot by identity alone."""
    return _Same(value)


def is_plain(value: object) -> bool:
    """Return True for a number, a string or the like, which is compared by value."""
    return isinstance(value, _PLAIN)


def is_immutable(value: object) -> bool:
    """Return True if a value changes only by being replaced, as far as a snapshot can tell."""
    if isinstance(value, tuple):
        return all(isinstance(element, _PLAIN) for element in value)
    return isinstance(value, (*_PLAIN, *_BY_IDENTITY))


def snapshot_of(value: object, *, versions: bool = False, depth: int = 0) -> object:
    """Return a description that differs if the object was changed.

    Args:
        value: anything.
        versions: True if writing to a tensor counts as a change, not only replacing it.
        depth: the depth at which the value was reached.
    """
    kind = type(value)
    if kind in _COMPARED_AS_THEY_ARE:
        return kind.__name__, value
    if isinstance(value, _COMPARED_BY_BITS):
        return kind.__name__, value.tobytes() if isinstance(value, np.generic) else repr(value)
    if isinstance(value, _PLAIN):
        return kind.__name__, value
    if isinstance(value, torch.Tensor):
        return same(value), torch_compat.version_of(value) if versions else 0
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, _GENERATORS):
        return kind.__name__, _generator_state(value)
    parts = None if depth == _DEEPEST else _parts_of(value)
    if parts is None and depth < _DEEPEST and isinstance(value, Iterator):
        parts = _iterator_parts(value)
    if parts is None:
        return same(value)
    return kind.__name__, [
        (name, snapshot_of(part, versions=versions, depth=depth + 1)) for name, part in parts
    ]


def are_different(one: object, other: object) -> bool:
    """Return True if two values have different snapshots."""
    return snapshot_of(one) != snapshot_of(other)


class Identities:
    """The identity of every object in reach of a value: a cheap test that nothing was replaced.

    It may see a change that a snapshot does not, never the other way round.

    Attributes:
        value: the object that was looked into.
    """

    def __init__(self, value: object) -> None:
        """Note what is in reach.

        Raises:
            LookupError: if something there changes without being replaced, such as an array's elements.
        """
        self.value = value
        self._fields: list[tuple[object, tuple[object, ...], tuple[object, ...]]] = []
        self._add(value, 0)

    def _add(self, value: object, depth: int) -> None:
        if isinstance(value, (*_PLAIN, *_BY_IDENTITY)) or (
            depth == _DEEPEST and not isinstance(value, (np.ndarray, *_GENERATORS))
        ):
            return
        fields = _fields_of(value)
        if fields is None:
            raise LookupError(f"a {type(value).__name__} is not looked into")
        self._fields.append((value, *fields))
        for part in fields[1]:
            self._add(part, depth + 1)

    def are_unchanged(self) -> bool:
        """Return True if the value holds the very objects that it held."""
        for holder, names, parts in self._fields:
            present = _fields_of(holder)
            if present is None or len(present[1]) != len(parts) or len(present[0]) != len(names):
                return False
            if not (all(map(operator.is_, present[1], parts)) and all(map(operator.is_, present[0], names))):
                return False
        return True


def _fields_of(value: object) -> tuple[tuple[object, ...], tuple[object, ...]] | None:
    """Return names and values of what a dictionary, sequence or plain object holds; else None."""
    kind: Any = type(value)
    if kind is list or kind is tuple:
        return (), tuple(value)  # type: ignore[arg-type]
    if kind is not dict:
        if isinstance(value, (Mapping, Iterator, *CONTAINERS, *_OF_PARTS)) or _all_slot_names(kind):
            return None
        value = getattr(value, "__dict__", None)
    return (tuple(value), tuple(value.values())) if isinstance(value, dict) else None


def leaves_within(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and modules in reach of a value, each after its dotted path."""
    if isinstance(value, torch.Tensor | nn.Module):
        yield path, value
        return
    for name, part in (_parts_of(value) or ()) if depth < _DEEPEST else ():
        yield from leaves_within(part, f"{path}.{name}" if path else str(name), depth + 1)


def _parts_of(value: object) -> list[tuple[object, object]] | None:
    """Return an object's parts, each after its name or index; None if it is not looked into."""
    if isinstance(value, (*_PLAIN, *_BY_IDENTITY)):
        return None
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, CONTAINERS):
        return list(enumerate(value))
    kind: Any = type(value)
    slots: list[tuple[object, object]] = [
        (name, getattr(value, name)) for name in _all_slot_names(kind) if hasattr(value, name)
    ]
    fields = getattr(value, "__dict__", None)
    return slots or None if fields is None else [*slots, *fields.items()]


@functools.lru_cache(maxsize=1024)
def _all_slot_names(kind: Hashable) -> tuple[str, ...]:
    """Return the names that a class and its bases declare in ``__slots__``."""
    classes = kind.__mro__ if isinstance(kind, type) else ()
    return tuple(name for base in classes for name in _slot_names(base))


def _slot_names(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    public = [names] if isinstance(names, str) else list(names)
    mangled = kind.__name__.lstrip("_")
    return [
        f"_{mangled}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in public
        if name not in ("__dict__", "__weakref__")
    ]


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
