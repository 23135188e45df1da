"""Replaces functions of PyTorch within contexts, by one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

PATCHING = threading.RLock()


@contextlib.contextmanager
def attribute_reads() -> Iterator[dict[tuple[int, str], torch.nn.Module]]:
    """Note which attributes this thread reads from modules.

    Yields:
        The module of each read, by its identity and the attribute's name; filled as the code runs.
    """
    reads: dict[tuple[int, str], torch.nn.Module] = {}
    thread = threading.get_ident()

    def read(module: torch.nn.Module, name: str) -> Any:
        if threading.get_ident() == thread:
            reads[id(module), name] = module
        return beneath(module, name)

    with PATCHING:
        # A planned module within a captured model plans for itself meanwhile.
        outer = torch.nn.Module.__dict__.get("__getattribute__")
        beneath = outer or object.__getattribute__
        setattr(torch.nn.Module, "__getattribute__", read)  # noqa: B010
        try:
            yield reads
        finally:
            if outer is None:
                delattr(torch.nn.Module, "__getattribute__")
            else:
                setattr(torch.nn.Module, "__getattribute__", outer)  # noqa: B010


@contextlib.contextmanager
def attributes_heard(
    kinds: Iterable[type], note_read: Callable[[Any, str], None], note_write: Callable[[Any, str], None]
) -> Iterator[None]:
    """Tell which attributes of plain Python objects this thread reads, assigns and deletes.

    Args:
        kinds: classes that look attributes up as ``object`` does; their subclasses are heard, too.
        note_read: is told object and name before each read.
        note_write: before each assignment and deletion.
    """
    thread = threading.get_ident()
    saved: list[tuple[Any, str, Any]] = []

    def replace(kind: Any, method: str, note: Callable[[Any, str], None]) -> None:
        beneath = getattr(kind, method)
        if getattr(beneath, "is_heard", False):  # a base's
            return

        def heard(value: Any, name: str, *new: Any) -> Any:
            if threading.get_ident() == thread:
                note(value, name)
            return beneath(value, name, *new)

        heard.is_heard = True  # type: ignore[attr-defined]
        saved.append((kind, method, kind.__dict__.get(method)))
        setattr(kind, method, heard)

    with PATCHING:
        try:
            for kind in kinds:
                replace(kind, "__getattribute__", note_read)
                replace(kind, "__setattr__", note_write)
                replace(kind, "__delattr__", note_write)
            yield
        finally:
            for kind, method, own in reversed(saved):
                if own is None:
                    delattr(kind, method)
                else:
                    setattr(kind, method, own)


@contextlib.contextmanager
def seeding_replaced(instead: Callable[..., Any]) -> Iterator[None]:
    """Let this thread's calls of ``torch.manual_seed`` and ``torch.seed`` reach another function."""
    thread = threading.get_ident()

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            return (instead if threading.get_ident() == thread else original)(*args, **kwargs)

        return seed

    with PATCHING:
        names = [(module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed")]
        saved = [getattr(module, name) for module, name in names]
        try:
            for (module, name), original in zip(names, saved, strict=True):
                setattr(module, name, replacement(original))
            yield
        finally:
            for (module, name), original in zip(names, saved, strict=True):
                setattr(module, name, original)
