"""Replaces functions of PyTorch within contexts, by one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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
