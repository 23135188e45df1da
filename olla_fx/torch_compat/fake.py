"""Makes fake tensors: shapes and types without memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses import functional_tensor as _functional_tensor
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes

from olla_fx.torch_compat.patches import PATCHING

DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    _symbolic_shapes.GuardOnDataDependentSymNode,
    _fake_tensor.DataDependentOutputException,
    _fake_tensor.DynamicOutputShapeException,
)
"""Errors of fake tensors if Python asks for a value that only real data could give."""


def new_fake_mode() -> Any:
    """Return a ``FakeTensorMode`` in which ``.item()`` gives a symbolic number instead of an error."""
    shape_env = _symbolic_shapes.ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    return _fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor holds values, as fake tensors and those on the meta device do not."""
    return not tensor.is_meta and not isinstance(tensor, _fake_tensor.FakeTensor)


@contextlib.contextmanager
def lists_read_by(read: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Let ``tolist`` of traced tensors, which no mode sees, ask a function first.

    Args:
        read: returns the list, or ``NotImplemented``.
    """
    kinds: tuple[Any, ...] = (_fake_tensor.FakeTensor, _functional_tensor.FunctionalTensor)

    def replacement(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def tolist(tensor: torch.Tensor) -> Any:
            answer = read(tensor)
            return original(tensor) if answer is NotImplemented else answer

        return tolist

    with PATCHING:
        saved = [kind.tolist for kind in kinds]
        try:
            for kind, original in zip(kinds, saved, strict=True):
                kind.tolist = replacement(original)
            yield
        finally:
            for kind, original in zip(kinds, saved, strict=True):
                kind.tolist = original


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


def has_open_sizes(value: object) -> bool:
    """Return True if a tensor's sizes, strides or offset depend on numbers that nobody knows."""
    return isinstance(value, torch.Tensor) and bool(_symbolic_shapes.free_unbacked_symbols(value))


def assume_sign(number: Any, *, positive: bool) -> None:
    """Let a symbolic number answer comparisons with 0; a concrete one is left alone."""
    torch._check(number > 0 if positive else number < 0)  # type: ignore[no-untyped-call]
