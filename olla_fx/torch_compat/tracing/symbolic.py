"""Makes symbolic sizes, and reads expressions and guards of them as Python code."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.printers import PythonPrinter

_NAMES: dict[str, Any] = {**_symbolic_shapes.SYMPY_INTERP, "math": math}

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def new_size(fake_mode: Any, index: int, hint: int) -> torch.SymInt:
    """Return a symbol for a size of at least 2, which shares nothing with other sizes of equal hint.

    Args:
        fake_mode: from :func:`~olla_fx.torch_compat.new_fake_mode`.
        index: different for each symbol of the mode.
        hint: the value with which questions about it are answered; each answer becomes a guard.
    """
    environment = fake_mode.shape_env
    # Here, as importing Dynamo takes as much memory as torch's other Python code together.
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"size{index}")
    symbol = environment.create_symbol(hint, source, dynamic_dim=_symbolic_shapes.DimDynamic.DYNAMIC)
    size: torch.SymInt = environment.create_symintnode(symbol, hint=hint, source=source)
    return size


def track_size(size: torch.SymInt) -> None:
    """Let the graph that is being traced, if there is one, know a symbol that is no size of its inputs."""
    mode = _proxy_tensor.get_proxy_mode()
    if mode is None or size.node.expr in mode.tracer.sympy_expr_tracker:
        return
    node = mode.tracer.create_node("call_function", operator.index, (size.node.hint,), {})
    _proxy_tensor.track_tensor_tree(size, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)


def forget_numbers_read(fake_mode: Any) -> None:
    """Forget that numbers were read from tensors that nothing traced from now on returns."""
    fake_mode.shape_env.pending_fresh_unbacked_symbols.clear()
    fake_mode.epoch += 1


@contextlib.contextmanager
def sizes_unguarded(values: Iterable[Any]) -> Iterator[None]:
    """Let symbolic sizes answer questions by their hints without a guard, while the context lasts.

    Args:
        values: among which are tensors of such sizes, if there are any.
    """
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    sizes: Iterator[Any] = (size for tensor in tensors for size in tensor.shape)
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    with contextlib.nullcontext() if symbolic is None else symbolic.node.shape_env.suppress_guards():
        yield


def is_size(number: Any) -> bool:
    """Return True for a number that is known to follow from sizes alone."""
    return type(number) is int or (
        isinstance(number, torch.SymInt) and type(number.node) is SymNode and number.node.has_hint()
    )


def is_same_size(one: Any, other: Any) -> bool:
    """Return True if two sizes are equal whatever the symbols' values are; asks for no guard."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is type(other) and bool(one == other)


def hint_of(number: Any) -> Any:
    """Return the value that a symbolic number has at the hints, without a guard; others as they are."""
    return number.node.hint if isinstance(number, SYMBOLIC) else number


def expression_of(number: Any, symbols: frozenset[Any]) -> Any:
    """Return a symbolic number as a formula of sizes, written in one way, or the number that it must be.

    Args:
        number: symbolic.
        symbols: of the sizes, from :func:`symbol_of`.

    Returns:
        None if it depends on anything else, as late-bound scalars do.
    """
    expression = number.node.expr
    if not expression.free_symbols <= symbols:
        return None
    if isinstance(expression, sympy.Integer):
        return int(expression)
    return sympy.expand(expression) if isinstance(number, torch.SymInt) else expression


def divisor_of(expression: Any) -> int:
    """Return a whole number that divides a formula's value at all sizes."""
    content, _ = expression.primitive()
    return int(content) if content.is_Integer and expression.is_integer else 1


def symbol_of(size: torch.SymInt) -> Any:
    """Return the symbol that stands for a size in formulas, whatever became known of it since."""
    return size.node._expr


def is_constant(size: torch.SymInt) -> bool:
    """Return True if tracing has assumed one value of a size."""
    return isinstance(size.node.expr, sympy.Integer)


def guards_of(fake_mode: Any, fixed: Iterable[torch.SymInt] = ()) -> list[Any]:
    """Return the conditions on sizes that tracing has assumed.

    Args:
        fake_mode: of the tracing run.
        fixed: sizes that have one value, which are left out.
    """
    values = {symbol_of(size): sympy.Integer(size.node.hint) for size in fixed}
    return [guard.expr.xreplace(values) for guard in fake_mode.shape_env.guards]


def function_of(symbols: Sequence[Any], expressions: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    """Compile formulas to one function of the sizes.

    Args:
        symbols: from :func:`symbol_of`, in the sequence of the function's arguments.
        expressions: formulas and conditions.
    """
    printer = PythonPrinter()
    names = ", ".join(f"{symbol}" for symbol in symbols)
    values = "".join(f"    {printer.doprint(expression)},\n" for expression in expressions)
    source = f"def formulas({names}):\n    return (\n{values}    )\n"
    namespace = dict(_NAMES)
    exec(compile(source, "<formulas of sizes>", "exec"), namespace)
    function: Callable[..., tuple[Any, ...]] = namespace["formulas"]
    return function
