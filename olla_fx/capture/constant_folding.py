"""Tells Python the values of tensors that depend on no input of the step.

``(torch.arange(n).diff() != 1).any()`` has one value, whatever the data: transformers' language models ask
for such a one to see whether several sequences are packed into a row. Fake tensors cannot tell it. While
on, this mode remembers how tensors were made that come from no other tensor, and when Python wants the
number in one, computes it, on real tensors, as eager would. Whatever depends on inputs, weights, random
numbers or uninitialised memory stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from olla_fx import operators, torch_compat
from olla_fx.torch_compat import TorchDispatchMode, pytree

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 22
_DEEPEST = 64
_QUESTIONS = frozenset({aten._local_scalar_dense.default, aten.equal.default})
# Operators that look at their argument's shape and type alone.
_LIKE = frozenset(
    {
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Recipe:
    """How a tensor was made: an operator, and its arguments with recipes in the place of tensors."""

    operator: Any
    arguments: tuple[Any, dict[str, Any]]
    result: int
    depth: int

    def cook(self, made: dict[int, Any]) -> torch.Tensor:
        """Compute the tensor; ``made`` holds what was computed already."""
        key = id(self.arguments)
        if key not in made:
            args, kwargs = pytree.tree_map_only(_Recipe, lambda each: each.cook(made), self.arguments)
            made[key] = pytree.tree_leaves(self.operator(*args, **kwargs))
        tensor: torch.Tensor = made[key][self.result]
        return tensor


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While on, ``item``, ``bool`` and ``torch.equal`` answer for tensors of known values."""

    def __init__(self) -> None:
        """Make the mode; it acts within a ``with`` block."""
        super().__init__()  # type: ignore[no-untyped-call]
        # A view of a known tensor whose own recipe is too long has None: writing to it must be noticed.
        self._recipes = torch_compat.tensor_dictionary()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, or answer from what is known."""
        arguments = (tuple(args), dict(kwargs or {}))
        recipe = self._recipe_for(func, arguments)
        if func in _QUESTIONS and recipe is not None:
            with torch_compat.real_tensors():
                return recipe.cook({})
        result = self.run(func, *arguments)
        if any(each in self._recipes for each in _written_tensors(func, arguments)):
            self._recipes.clear()
        elif recipe is not None or (func.is_view and args[0] in self._recipes):
            for index, leaf in enumerate(pytree.tree_leaves(result)):
                if isinstance(leaf, torch.Tensor):
                    known = recipe if leaf.numel() <= _MOST_ELEMENTS else None
                    self._recipes[leaf] = known and replace(known, result=index)
        return result

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose answer is not known."""
        return operators.UNDER_OWN_NAME.get(operator, operator)(*args, **kwargs)

    def _recipe_for(self, operator: Any, arguments: tuple[Any, dict[str, Any]]) -> _Recipe | None:
        """How to compute an operator's results for real; None where something in it is unknown."""
        if operator._schema.is_mutable or not _is_deterministic(operator):
            return None
        leaves, spec = pytree.tree_flatten(arguments)
        known: list[Any] = []
        depth = 0
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = _same_kind(leaf) if operator in _LIKE else self._recipes.get(leaf)
                if leaf is None:
                    return None
                depth = max(depth, leaf.depth + 1)
            elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                return None
            known.append(torch.device("cpu") if isinstance(leaf, torch.device) else leaf)
        return _Recipe(operator, pytree.tree_unflatten(known, spec), 0, depth) if depth < _DEEPEST else None


def _is_deterministic(operator: Any) -> bool:
    """Return True if an operator's results are neither random nor uninitialised."""
    return torch.Tag.nondeterministic_seeded not in operator.tags and "empty" not in operator._schema.name


def _written_tensors(operator: Any, arguments: tuple[Any, dict[str, Any]]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to."""
    args, kwargs = arguments
    if not operator._schema.is_mutable:
        return []
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [
        given.get(argument.name)
        for argument in operator._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _same_kind(tensor: torch.Tensor) -> _Recipe | None:
    """A recipe for some tensor of the same shape, layout and type."""
    if not all(type(each) is int for each in (*tensor.shape, *tensor.stride())):
        return None
    layout = (tuple(tensor.shape), tensor.stride())
    return _Recipe(aten.empty_strided.default, (layout, {"dtype": tensor.dtype}), 0, 0)
