"""Comparable pictures of Python values, and what tensors and modules lie within them.

A captured step bakes the Python values that its code read. A *picture* of such a value, taken when
capturing, equals one taken later exactly if nothing in reach changed; objects are looked into a few
levels deep, functions and modules are told apart by identity.
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

_DEEPEST = 4
_MOST_CALLS = 4
_LARGEST_ARRAY_BYTES = 1 << 16
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_COMPARED_AS_THEY_ARE = frozenset(_PLAIN) - {float, complex, np.generic}
_COMPARED_BY_BITS = (float, complex, np.generic)  # 0.0 == -0.0, and nan != nan
CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
"""Types whose elements a picture shows."""

_ATOMIC = (
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    logging.Logger,
)
_OF_PARTS = (types.MethodType, functools.partial, np.ndarray, *_GENERATORS)


class _Same:
    """Equal to a picture of the very same object; keeps it alive, so that its identity is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string or the like, compared by value."""
    return isinstance(value, _PLAIN)


def is_atomic(value: object) -> bool:
    """Whether a value cannot change but by being replaced, as far as a picture can tell."""
    if isinstance(value, tuple):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, (*_PLAIN, *_ATOMIC, torch.Tensor))


def same(planned: object, present: object) -> bool:
    """Whether two atomic values are the same for a captured step."""
    if planned is present:
        return True
    if isinstance(planned, (*_PLAIN, tuple)) and type(planned) is type(present):
        return picture_of(planned) == picture_of(present)
    return False


def picture_of(value: object, *, versions: bool = False, depth: int = 0) -> object:
    """A value that differs when the object was changed.

    Args:
        value: anything.
        versions: whether writing to a tensor changes the picture, not only replacing it.
        depth: how deep in the pictured object it was met.
    """
    kind = type(value)
    if kind in _COMPARED_AS_THEY_ARE:
        return kind.__name__, value
    if isinstance(value, _COMPARED_BY_BITS):
        return type(value).__name__, value.tobytes() if isinstance(value, np.generic) else repr(value)
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return _Same(value), value._version if versions else 0
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, _GENERATORS):
        return type(value).__name__, _generator_state(value)
    parts = None if depth == _DEEPEST else _parts_of(value)
    if parts is None and depth < _DEEPEST and isinstance(value, Iterator):
        parts = _iterator_parts(value)
    if parts is None:
        return _Same(value)
    return type(value).__name__, [
        (name, picture_of(part, versions=versions, depth=depth + 1)) for name, part in parts
    ]


class Glance:
    """Every object in reach of a value, to see at low cost that none was put in another's place.

    It may report a change where a picture shows none, never the other way round.

    Attributes:
        value: what was looked at.
    """

    def __init__(self, value: object) -> None:
        """Look at a value that a picture was taken of.

        Raises:
            LookupError: when something in it changes without being replaced, such as an array's elements.
        """
        self.value = value
        self._held: list[tuple[object, tuple[object, ...], tuple[object, ...]]] = []
        self._look_at(value, 0)

    def _look_at(self, value: object, depth: int) -> None:
        if isinstance(value, (*_PLAIN, *_ATOMIC, torch.Tensor)) or (
            depth == _DEEPEST and not isinstance(value, (np.ndarray, *_GENERATORS))
        ):
            return
        held = _fields(value)
        if held is None:
            raise LookupError(f"a {type(value).__name__} is not looked into")
        names, values = held
        self._held.append((value, names, values))
        for each in values:
            self._look_at(each, depth + 1)

    def is_unchanged(self) -> bool:
        """Whether the value holds the very objects that it held."""
        for each, names, values in self._held:
            present = _fields(each)
            if present is None or len(present[1]) != len(values) or len(present[0]) != len(names):
                return False
            if not (all(map(operator.is_, present[1], values)) and all(map(operator.is_, present[0], names))):
                return False
        return True


def _fields(value: object) -> tuple[tuple[object, ...], tuple[object, ...]] | None:
    """Names and values of what a dictionary, sequence or plain object holds; None of anything else."""
    kind: Any = type(value)
    if kind is list or kind is tuple:
        return (), tuple(value)  # type: ignore[arg-type]
    if kind is not dict:
        if isinstance(value, (Mapping, Iterator, *CONTAINERS, *_OF_PARTS)) or _all_slot_names(kind):
            return None
        value = getattr(value, "__dict__", None)
    return (tuple(value), tuple(value.values())) if isinstance(value, dict) else None


def leaves_within(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors and modules in reach of a value.

    Yields:
        Dotted path, ``path`` first, and the tensor or module.
    """
    if isinstance(value, torch.Tensor | nn.Module):
        yield path, value
        return
    for name, part in (_parts_of(value) or ()) if depth < _DEEPEST else ():
        yield from leaves_within(part, f"{path}.{name}" if path else str(name), depth + 1)


def _parts_of(value: object) -> list[tuple[object, object]] | None:
    """What an object is made of, by name or place; None where it is not looked into."""
    if isinstance(value, (*_PLAIN, *_ATOMIC)):
        return None
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, Mapping):
        return [(str(key), each) for key, each in value.items()]
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
    """What the classes of an object's type declare in ``__slots__``."""
    classes = kind.__mro__ if isinstance(kind, type) else ()
    return tuple(name for each in classes for name in _slot_names(each))


def _slot_names(each: type) -> list[str]:
    names = each.__dict__.get("__slots__", ())
    public = [names] if isinstance(names, str) else list(names)
    mangled = each.__name__.lstrip("_")
    return [
        f"_{mangled}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in public
        if name not in ("__dict__", "__weakref__")
    ]


def _generator_state(generator: Any) -> bytes:
    """The state of a generator of random numbers."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy().tobytes())
    return pickle.dumps(generator)


def _iterator_parts(iterator: Iterator[object]) -> list[tuple[object, object]]:
    """How far an iterator is, as copying it would find out; advancing it changes this."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = iterator.__reduce__()
    except TypeError:  # not copyable
        return [("text", repr(iterator))]
    return list(enumerate(reduced)) if isinstance(reduced, tuple) else [("text", repr(iterator))]


def function_values(function: object) -> dict[str, object]:
    """What a Python function reads beside its arguments: closure, defaults, global variables.

    Functions that it finds there are followed in turn, a few levels deep.

    Args:
        function: anything; empty unless it is a plain function, and for torch's own, which read nothing
            that changes.
    """
    values: dict[str, object] = {}
    followed: set[int] = set()
    level = [("", function)]
    for _ in range(_MOST_CALLS):
        following: list[tuple[str, object]] = []
        for path, each in level:
            if isinstance(each, types.FunctionType) and id(each) not in followed and _is_users(each):
                followed.add(id(each))
                read = {f"{path}{name}": value for name, value in _names_read(each).items()}
                values |= read
                following += [(f"{name}.", value) for name, value in read.items()]
        level = following
    return values


def _is_users(function: types.FunctionType) -> bool:
    return not (function.__module__ or "").startswith("torch.")


def _names_read(function: types.FunctionType) -> dict[str, object]:
    """What one function reads beside its arguments, by name."""
    values: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    codes = [function.__code__]
    for code in codes:  # grows: comprehensions and inner functions are code of their own
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                values[name] = function.__globals__[name]
    values["(defaults)"] = (function.__defaults__, function.__kwdefaults__)
    return values
