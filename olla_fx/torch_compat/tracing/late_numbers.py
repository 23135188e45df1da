"""Traces Python numbers that are to be inputs of the graph.

PyTorch's symbolic numbers do algebra: ``beta * 0`` is 0 to them, and two comparisons may become one. A
graph that is to have eager's bits does Python's arithmetic, so here every result of an operator is a symbol
of its own, whose value the operator itself computed. Decisions that Python takes are noted with the
operators that led there, to be taken again by the same operators at every call.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental.sym_node import SymNode

from olla_fx.torch_compat.patches import PATCHING

_SYMBOLIC: tuple[Any, ...] = (torch.SymFloat, torch.SymInt, torch.SymBool)

_PYTHON_OPERATORS = frozenset(
    (
        operator.add, operator.sub, operator.mul, operator.truediv, operator.mod, operator.pow, operator.neg,
        operator.pos, operator.abs, operator.lt, operator.le, operator.gt, operator.ge, operator.eq,
        operator.ne, torch.sym_float, torch.sym_not, torch.sym_min, torch.sym_max,
    )
)  # fmt: skip
"""Operators that give a symbolic number exactly what they give a Python number."""

_OPERATORS_ON_INTEGERS = frozenset(
    (operator.floordiv, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift)
)


@dataclass(frozen=True, slots=True)
class Expression:
    """What was computed of late-bound numbers, by Python's operators.

    Attributes:
        function: computes it; None for a number itself.
        arguments: expressions and constants; the index of a number itself.
    """

    function: Callable[..., Any] | None
    arguments: tuple[Any, ...]

    @property
    def indices(self) -> frozenset[int]:
        """The numbers that it is computed of."""
        if self.function is None:
            return frozenset(self.arguments)
        parts = (part.indices for part in self.arguments if isinstance(part, Expression))
        return frozenset().union(*parts)

    def evaluate(self, numbers: Sequence[Any]) -> Any:
        """Compute it for other numbers."""
        if self.function is None:
            return numbers[self.arguments[0]]
        return self.function(
            *(part.evaluate(numbers) if isinstance(part, Expression) else part for part in self.arguments)
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """A yes or no that traced code asked for."""

    question: Expression
    answer: bool


class LateNumbers:
    """The late-bound numbers of one trace.

    Attributes:
        decisions: that traced code took by them.
        pinned: indices of numbers whose values a graph cannot do without.
    """

    def __init__(self, shape_env: Any) -> None:
        """Begin without any."""
        self.decisions: dict[Decision, None] = {}
        self.pinned: set[int] = set()
        self._shape_env = shape_env
        self._symbols: dict[Any, Expression] = {}

    def new(self, index: int, value: float) -> Any:
        """Return the symbolic number that stands for a late-bound one."""
        return self._symbolic(value, Expression(None, (index,)))

    def put_into(self, placeholder: Any, number: Any) -> None:
        """Let ``item()`` of a fake tensor return a number."""
        placeholder.item_memo = number

    def pin(self, expression: Expression) -> None:
        """Note that a graph holds for the values of some numbers only."""
        self.pinned |= expression.indices

    def finish(self, values: Sequence[Any]) -> None:
        """Pin numbers that torch's own symbolic algebra asked for, or that decide the shape of a value.

        Args:
            values: of all nodes of the graph.
        """
        asked = [symbol for guard in self._shape_env.guards for symbol in guard.expr.free_symbols]
        for value in values:
            if isinstance(value, torch.Tensor):
                sizes = (*value.shape, *value.stride(), value.storage_offset())
                symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
                asked += [symbol for size in symbolic for symbol in size.node.expr.free_symbols]
        for symbol in asked:
            if symbol in self._symbols:
                self.pin(self._symbols[symbol])

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Let symbolic numbers be computed as Python's are, within a trace."""
        mode: Any = _proxy_tensor.ProxyTorchDispatchMode
        with PATCHING:
            saved = mode.__sym_dispatch__

            def dispatch(tracer: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
                result = self._compute(function, args)
                if result is None:
                    return saved(tracer, function, types, args, kwargs)
                _proxy_tensor._sym_register(tracer.tracer, function, args, result)
                return result

            mode.__sym_dispatch__ = dispatch
            try:
                yield
            finally:
                mode.__sym_dispatch__ = saved

    def _compute(self, function: Any, args: Sequence[Any]) -> Any:
        """Return an operator's result; None if an argument is another symbolic number."""
        symbolic: list[Any] = [argument.node for argument in args if isinstance(argument, _SYMBOLIC)]
        if not symbolic or not all(isinstance(node, LateNode) and node.numbers is self for node in symbolic):
            return None
        expression = Expression(function, tuple(_expression_of(argument) for argument in args))
        hints = [argument.node.hint if isinstance(argument, _SYMBOLIC) else argument for argument in args]
        is_exact = function in _PYTHON_OPERATORS or (
            function in _OPERATORS_ON_INTEGERS and all(isinstance(hint, int) for hint in hints)
        )
        if not is_exact:
            self.pin(expression)
        return self._symbolic(function(*hints), expression)

    def _symbolic(self, value: Any, expression: Expression) -> Any:
        kind = type(value)
        number = int(value) if kind is bool else value
        if kind not in (int, float, bool) or not math.isfinite(number):
            raise TypeError(f"a late-bound number became {value!r}")
        # Here, as importing Dynamo takes as much memory as torch's other Python code together.
        from torch._dynamo.source import ConstantSource

        source = ConstantSource(f"late{len(self._symbols)}")
        dynamic = _symbolic_shapes.DimDynamic.DYNAMIC
        symbol = self._shape_env.create_unspecified_symbol(number, source, dynamic)
        self._symbols[symbol] = expression
        symbolic = sympy.Ne(symbol, 0) if kind is bool else symbol
        node = LateNode(symbolic, self._shape_env, kind, value)
        node.numbers, node.expression = self, expression
        of_kind: Any = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[kind]
        return of_kind(node)


class LateNode(SymNode):
    """What a symbolic number of :class:`LateNumbers` is made of."""

    numbers: LateNumbers
    expression: Expression

    def evaluate(self, size_oblivious: bool = False) -> Any:
        """Return the value that the trace is for; only a yes or no leaves the graph to other values."""
        if self.pytype is bool:
            self.numbers.decisions[Decision(self.expression, bool(self.hint))] = None
        else:
            self.numbers.pin(self.expression)
        return self.hint

    def bool_(self) -> bool:
        """Return whether it is not 0."""
        if self.pytype is bool:
            return bool(self.evaluate())
        question = Expression(bool, (self.expression,))
        self.numbers.decisions[Decision(question, bool(self.hint))] = None
        return bool(self.hint)

    def expect_true(self, file: str, line: int) -> bool:
        """Return a condition's answer."""
        return bool(self.evaluate())

    def _graph_repr(self) -> str:
        return repr(self.evaluate())

    def str(self) -> Any:
        """Return the text of the value that the trace is for."""
        return repr(self.evaluate())


def _expression_of(argument: Any) -> Any:
    return argument.node.expression if isinstance(argument, _SYMBOLIC) else argument
