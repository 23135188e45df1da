"""Lets ``int(tensor)`` give a symbol while a step is traced.

``int`` is the way in which most code asks for a length, ``int(lengths.max())``, and Python lets it return
nothing but numbers. So while a step is captured with such numbers as symbols, the functions that asked find
another ``int`` among their global variables, which gives what ``item()`` gives. Otherwise it acts as ``int``
does; to other threads, too, which may run the same functions meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from olla_fx import torch_compat

_NAME = "int"


class _Meta(type):
    """Makes a class act as ``int``, of which symbolic integers are instances, too."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the whole number that something stands for."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor | torch.SymInt):
            number = args[0].item() if isinstance(args[0], torch.Tensor) else args[0]
            if isinstance(number, torch.SymInt) and torch_compat.is_size(number):
                return number
            return int(number)
        return int(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return True for a whole number or a symbol of one."""
        return isinstance(instance, int | torch.SymInt)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return True for ``int`` and what is made of it."""
        return issubclass(subclass, int)

    def __getattr__(cls, name: str) -> Any:
        """Return what ``int`` has under a name."""
        return getattr(int, name)

    def __eq__(cls, other: object) -> bool:
        """Return True for ``int`` itself, as in ``type(number) == int``."""
        return other is int or other is cls

    def __hash__(cls) -> int:
        """Return what ``int`` has, as a key of a dictionary."""
        return hash(int)


class _Integer(metaclass=_Meta):
    """Stands for ``int`` among the global variables of functions."""


@contextlib.contextmanager
def integers_as_symbols(namespaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let ``int(tensor)`` give a symbol where ``tensor.item()`` does, while the context lasts.

    Args:
        namespaces: global variables of functions; those that have an ``int`` of their own are left alone.
    """
    with torch_compat.PATCHING:
        changed = [namespace for namespace in namespaces if _NAME not in namespace]
        try:
            for namespace in changed:
                namespace[_NAME] = _Integer
            yield
        finally:
            for namespace in changed:
                namespace.pop(_NAME, None)
