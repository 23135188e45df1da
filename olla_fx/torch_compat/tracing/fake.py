"""Makes fake tensors: shapes and types without memory."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import sympy
import torch
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses import functional_tensor as _functional_tensor
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes

from olla_fx.torch_compat.patches import PATCHING
from olla_fx.torch_compat.tracing.layouts import TrueLayouts

DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    _symbolic_shapes.GuardOnDataDependentSymNode,
    _fake_tensor.DataDependentOutputException,
    _fake_tensor.DynamicOutputShapeException,
)
"""Errors of fake tensors if Python asks for a value that only real data could give."""


_RELATIONS: dict[Any, tuple[Callable[..., bool], Callable[..., bool]]] = {
    sympy.Eq: (operator.eq, operator.eq),
    sympy.Ne: (operator.ne, operator.ne),
    sympy.Gt: (operator.gt, operator.lt),
    sympy.Lt: (operator.lt, operator.gt),
    sympy.Ge: (operator.ge, operator.le),
    sympy.Le: (operator.le, operator.ge),
}
"""Relations, each with the one that holds with its sides exchanged."""

Compare = Callable[[Callable[..., bool], int | float], bool]
"""Answers whether a number is in a relation to a constant."""


class _Numbers(_symbolic_shapes.ShapeEnv):
    """The symbolic numbers of a fake mode, of which some can be compared with constants."""

    def __init__(self) -> None:
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
        self.comparable: dict[Any, Compare] = {}
        self.signs: dict[Any, int] = {}

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Decide an expression; where nobody else can, by comparing a number with a constant."""
        compared = _compared(orig_expr)
        # At once, not by PyTorch's algebra: what that imports, and reads of sources, is 4 MiB.
        for number, relation, value in compared:
            if number in self.signs and value == 0:
                return sympy.true if relation(self.signs[number], 0) else sympy.false
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except _symbolic_shapes.GuardOnDataDependentSymNode:
            for number, relation, value in compared:
                if number in self.comparable:
                    return sympy.true if self.comparable[number](relation, value) else sympy.false
            raise

    # To know which files are not the user's, PyTorch imports its exporters and compilers, which is 45 MiB.

    def _get_user_frame(self) -> FrameType | None:
        """Look for no line of the user's that made a number."""
        return inspect.currentframe()

    # For a log that nobody reads, PyTorch reads the sources of all functions on the stack, which is 2 MiB.

    def _log_create_unbacked_symbol(self, *args: Any, **kwargs: Any) -> None:
        """Log no stack that made a number."""

    def _log_guard(self, *args: Any, **kwargs: Any) -> None:
        """Log no stack that assumed something of a number."""


def _compared(expression: Any) -> list[tuple[Any, Callable[..., bool], int | float]]:
    """Return what a relation to a constant compares: a symbol or term, the relation, and the constant."""
    compared = []
    for index, relation in enumerate(_RELATIONS.get(expression.func, ())):
        number, constant = expression.args[index], expression.args[1 - index]
        if constant.is_Integer or constant.is_Float:
            compared.append((number, relation, int(constant) if constant.is_Integer else float(constant)))
    return compared


def answer_comparisons(number: Any, compare: Compare) -> None:
    """Let a function answer comparisons of a symbolic number with constants, such as ``number > 3``.

    Args:
        number: from ``.item()`` of a tensor without values.
        compare: the function.
    """
    if isinstance(number, torch.SymInt | torch.SymFloat) and isinstance(number.node.shape_env, _Numbers):
        number.node.shape_env.comparable[number.node.expr] = compare


def new_fake_mode() -> Any:
    """Return a ``FakeTensorMode`` in which ``.item()`` gives a symbolic number instead of an error."""
    with _read_sources_forgotten():
        return TrueLayouts(allow_non_fake_inputs=True, shape_env=_Numbers())


def fake_mode_of(values: Iterable[object]) -> Any:
    """Return the mode of the fake tensors among some values; one of its own if there are none."""
    tensors = (value for value in values if isinstance(value, _fake_tensor.FakeTensor))
    first = next(tensors, None)
    return new_fake_mode() if first is None else first.fake_mode


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
    if isinstance(number, torch.SymInt | torch.SymFloat):
        number.node.shape_env.signs[number.node.expr] = 1 if positive else -1
