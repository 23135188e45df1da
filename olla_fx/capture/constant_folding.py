"""Folds tensors that depend on no input of the step when Python asks for their values.

``(torch.arange(n).diff() != 1).any()`` has one value, whatever the data: transformers' language models ask
for it to see whether several sequences are packed into a row. Fake tensors hold no values. While on, this
mode keeps the expressions of tensors that are made from no other tensor, and evaluates one on real tensors,
as eager would, when Python wants its number. Whatever depends on inputs, weights, random numbers or
uninitialised memory is not folded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from olla_fx import operators, torch_compat
from olla_fx.torch_compat import TorchDispatchMode, pytree, schema_of

aten = torch.ops.aten
_MAX_ELEMENTS = 1 << 22
_MAX_DEPTH = 64
# Operators by which Python reads values of tensors.
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default})
# Operators that read their argument's shape and type alone.
_LIKE = frozenset(
    {
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Expression:
    """One result of an operator on constants: its arguments hold expressions in the place of tensors."""

    operator: Any
    arguments: tuple[Any, dict[str, Any]]
    result: int
    depth: int

    def evaluate(self, results: dict[int, Any]) -> torch.Tensor:
        """Compute the tensor; ``results`` holds what was computed already."""
        key = id(self.arguments)
        if key not in results:
            args, kwargs = pytree.tree_map_only(
                _Expression, lambda expression: expression.evaluate(results), self.arguments
            )
            results[key] = pytree.tree_leaves(self.operator(*args, **kwargs))
        tensor: torch.Tensor = results[key][self.result]
        return tensor


class ConstantFolding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While on, ``item``, ``bool`` and ``torch.equal`` return the values of constant tensors."""

    def __init__(self) -> None:
        """Make the mode; it acts within a ``with`` block."""
        super().__init__()  # type: ignore[no-untyped-call]
        # None for a constant's view whose own expression is too large: a write to it must be noticed.
        self._expressions = torch_compat.tensor_dictionary()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, or fold it if Python reads a constant."""
        arguments = (tuple(args), dict(kwargs or {}))
        expression = self._expression_of(func, arguments)
        if func in _READS and expression is not None:
            with torch_compat.real_tensors():
                return expression.evaluate({})
        results = self.run(func, *arguments)
        if any(tensor in self._expressions for tensor in _written_tensors(func, arguments)):
            self._expressions.clear()
        elif expression is not None or (func.is_view and args[0] in self._expressions):
            for index, leaf in enumerate(pytree.tree_leaves(results)):
                if isinstance(leaf, torch.Tensor):
                    folded = expression if leaf.numel() <= _MAX_ELEMENTS else None
                    self._expressions[leaf] = folded and replace(folded, result=index)
        return results

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is not folded."""
        return operators.UNDER_OWN_NAME.get(operator, operator)(*args, **kwargs)

    def _expression_of(self, operator: Any, arguments: tuple[Any, dict[str, Any]]) -> _Expression | None:
        """Return the expression of an operator's first result; None if an argument is no constant."""
        if schema_of(operator).is_mutable or not _is_deterministic(operator):
            return None
        leaves, spec = pytree.tree_flatten(arguments)
        constants: list[Any] = []
        depth = 0
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = _expression_like(leaf) if operator in _LIKE else self._expressions.get(leaf)
                if leaf is None:
                    return None
                depth = max(depth, leaf.depth + 1)
            elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                return None
            constants.append(torch.device("cpu") if isinstance(leaf, torch.device) else leaf)
        if depth >= _MAX_DEPTH:
            return None
        return _Expression(operator, pytree.tree_unflatten(constants, spec), 0, depth)


def _is_deterministic(operator: Any) -> bool:
    """Return True if an operator's results are neither random nor uninitialised."""
    return torch.Tag.nondeterministic_seeded not in operator.tags and "empty" not in schema_of(operator).name


def _written_tensors(operator: Any, arguments: tuple[Any, dict[str, Any]]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to."""
    args, kwargs = arguments
    if not schema_of(operator).is_mutable:
        return []
    schema = schema_of(operator).arguments
    values = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    written = [
        values.get(argument.name)
        for argument in schema
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _expression_like(tensor: torch.Tensor) -> _Expression | None:
    """Return the expression of some tensor of the same shape, layout and type."""
    if not all(type(size) is int for size in (*tensor.shape, *tensor.stride())):
        return None
    layout = (tuple(tensor.shape), tensor.stride())
    return _Expression(aten.empty_strided.default, (layout, {"dtype": tensor.dtype}), 0, 0)
