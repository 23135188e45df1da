"""Makes fake tensors: shapes and types without memory."""

from __future__ import annotations

import contextlib
import linecache
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake_tensor
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes

DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    _symbolic_shapes.GuardOnDataDependentSymNode,
    _fake_tensor.DataDependentOutputException,
    _fake_tensor.DynamicOutputShapeException,
)
"""Errors of fake tensors if Python asks for a value that only real data could give."""


def new_fake_mode() -> Any:
    """Return a ``FakeTensorMode`` in which ``.item()`` gives a symbolic number instead of an error."""
    with _read_sources_forgotten():
        return _fake_tensor.FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=_symbolic_shapes.ShapeEnv(allow_scalar_outputs=True)
        )


@contextlib.contextmanager
def _read_sources_forgotten() -> Iterator[None]:
    """Forget the files that are read meanwhile for the lines of a traceback.

    A mode notes where it was made, and ``linecache`` keeps every file on the way, PyTorch's largest ones. It
    reads them again if they are asked for.
    """
    before = set(linecache.cache)
    try:
        yield
    finally:
        for path in set(linecache.cache) - before:
            linecache.cache.pop(path, None)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from logging a traceback for an error that is raised and explained anyway."""

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    log = logging.getLogger(_fake_tensor.__name__)
    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


def assume_sign(number: Any, *, positive: bool) -> None:
    """Let a symbolic number answer comparisons with 0; a concrete one is left alone."""
    torch._check(number > 0 if positive else number < 0)  # type: ignore[no-untyped-call]
