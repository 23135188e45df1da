"""Comparable pictures of Python values, and what tensors and modules lie within them.

A captured step bakes the Python values that its code read. A *picture* of such a value, taken when
capturing, equals one taken later exactly if nothing in reach changed; objects are looked into a few
levels deep, functions and modules are told apart by identity.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_DEEPEST = 4
_LARGEST_ARRAY_BYTES = 1 << 16
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_ATOMIC = (
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    logging.Logger,
)


class _Same:
    """Equal to a picture of the very same object; keeps it alive, so that its identity is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


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
        return bool(planned == present)
    return False


def picture_of(value: object, *, versions: bool = False, depth: int = 0) -> object:
    """A value that differs when the object was changed.

    Args:
        value: anything.
        versions: whether writing to a tensor changes the picture, not only replacing it.
        depth: how deep in the pictured object it was met.
    """
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return _Same(value), value._version if versions else 0
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_ARRAY_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    parts = None if depth == _DEEPEST else _parts_of(value)
    if parts is None:
        return _Same(value)
    return type(value).__name__, [
        (name, picture_of(part, versions=versions, depth=depth + 1)) for name, part in parts
    ]


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
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value))
    fields = getattr(value, "__dict__", None)
    return None if fields is None else list(fields.items())


def function_values(function: object) -> dict[str, object]:
    """What a Python function reads beside its arguments: closure, defaults, global variables.

    Args:
        function: anything; empty unless it is a plain function, and for torch's own, which read nothing
            that changes.
    """
    if not isinstance(function, types.FunctionType) or function.__module__.startswith("torch."):
        return {}
    values: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            values[name] = function.__globals__[name]
    values["(defaults)"] = (function.__defaults__, function.__kwdefaults__)
    return values
