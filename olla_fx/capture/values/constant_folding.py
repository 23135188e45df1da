"""Answers Python where it asks for values of tensors that follow from constants or from inputs alone.

``(torch.arange(n).diff() != 1).any()`` has one value, whatever the data: transformers' language models ask
for it to see whether several sequences are packed into a row. ``mask.all()`` of an input has one value in
each call. Fake tensors hold no values. While on, this mode keeps the recipes of tensors that are made from
constants and inputs, and computes one on real tensors, as eager would, when Python wants its number:
constants once and for all, inputs by the example (:mod:`olla_fx.capture.values.questions`), which makes the
answer a guard of the plan. Whatever depends on weights, random numbers or uninitialised memory is not
answered.

Operators whose results are as long as a mask has ones (``nonzero``, ``x[mask]``) are traced for the number
that there is: it is asked for like any other, and the operator becomes one of a known size.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from olla_fx import operators, torch_compat
from olla_fx.capture.symbols.sizes import SymbolicSizes
from olla_fx.capture.values.known_sizes import of_known_size
from olla_fx.capture.values.questions import Questions
from olla_fx.guards import Comparison, GivenInput, Recipe
from olla_fx.torch_compat import TorchDispatchMode, pytree, schema_of

aten = torch.ops.aten
_MAX_ELEMENTS = 1 << 22
_MAX_DEPTH = 64
_MAX_NUMBERS = 256
_TO_THE_END = torch.iinfo(torch.int64).max
# Operators by which Python reads values of tensors.
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default})
# Of these the ones that give truth values, whatever they read.
_TRUTHS = frozenset({aten.equal.default})
# How Python asks a fake tensor for its device, which it does more often than for anything else.
_DEVICE = torch.ops.prim.device.default
# Operators that return their argument's values in its layout.
_IDENTITIES = frozenset({aten.detach.default, aten.alias.default})
# Operators that read their argument's shape and type alone.
_LIKE = frozenset(
    {
        aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    }
)  # fmt: skip


class ConstantFolding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While on, ``item``, ``bool`` and ``torch.equal`` return the values of constants and of inputs."""

    def __init__(self, questions: Questions, symbols: SymbolicSizes | None = None) -> None:
        """Make the mode; it acts within a ``with`` block.

        Args:
            questions: answers what is asked of inputs.
            symbols: stand for numbers among the answers; None if numbers are to be given.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._questions = questions
        self._symbols = symbols
        # None for a tensor that a recipe's tensor lies in memory with, but that has none: a write counts.
        self._recipes = torch_compat.tensor_dictionary()
        self._storages: set[int] = set()
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Any:
        """Switch the mode on."""
        self._contexts.enter_context(torch_compat.lists_read_by(self._list_of))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Switch the mode off."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._contexts.close()

    def give(self, inputs: Sequence[torch.Tensor]) -> None:
        """Tell which tensors are the caller's, in order, of one micro-batch if there are several."""
        for index, tensor in enumerate(inputs):
            self._keep(tensor, GivenInput(index))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, or answer it if Python reads a constant or an input."""
        if func is _DEVICE:
            return func(*args)
        arguments = (tuple(args), dict(kwargs or {}))
        recipe = self._recipe_of(func, arguments)
        if func in _READS and isinstance(recipe, Recipe):
            is_number = func not in _TRUTHS and args[0].dtype is not torch.bool
            if not (is_number and self._questions.leaves_open(recipe)):
                return self._answer(recipe)
        operator, arguments = of_known_size(func, arguments, self)
        results = self.run(operator, *arguments)
        self._forget_written(func, arguments)
        if func is aten._local_scalar_dense.default and isinstance(recipe, Recipe):
            torch_compat.answer_comparisons(results, functools.partial(self._compare, recipe))
        if recipe is not None or (func.is_view and args[0] in self._recipes):
            for index, leaf in enumerate(pytree.tree_leaves(results)):
                if isinstance(leaf, torch.Tensor):
                    is_kept = recipe is not None and (recipe.inputs or _elements(leaf) <= _MAX_ELEMENTS)
                    self._keep(leaf, _of_result(recipe, index) if is_kept else None)
        return results

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is not answered."""
        return operators.under_own_name(operator, args)(*args, **kwargs)

    def number_of(self, operator: Any, tensor: torch.Tensor, *arguments: Any) -> Any:
        """Return the number that an operator makes of a constant or an input; None if others decide it.

        Args:
            operator: its result is a tensor with one element.
            tensor: its first argument.
            arguments: the others.
        """
        recipe = self._recipe_of(operator, ((tensor, *arguments), {}))
        if recipe is None:
            return None
        number = Recipe(aten._local_scalar_dense.default, ((recipe,), {}), depth=recipe.depth + 1)
        return self._answer(number)

    def _answer(self, recipe: Recipe) -> Any:
        """Return an answer, or the symbol that stands for it."""
        answer = self._questions.answer(recipe)
        if self._symbols is None or not recipe.inputs:
            return answer
        return self._symbols.answered(recipe.key, answer)

    def _compare(self, number: Recipe, relation: Callable[..., bool], constant: float) -> bool:
        comparison = Comparison(relation, constant)
        return bool(self._questions.answer(Recipe(comparison, ((number,), {}), depth=number.depth + 1)))

    def _list_of(self, tensor: torch.Tensor) -> Any:
        recipe = self._recipes.get(tensor)
        if not isinstance(recipe, GivenInput | Recipe):
            return NotImplemented
        listed = Recipe(torch.Tensor.tolist, ((recipe,), {}))
        is_number = tensor.dtype is not torch.bool
        if is_number and self._questions.leaves_open(listed):
            return NotImplemented
        return self._questions.answer(listed)

    def _keep(self, tensor: torch.Tensor, recipe: GivenInput | Recipe | None) -> None:
        self._recipes[tensor] = recipe
        self._storages.add(torch_compat.storage_key(tensor))

    def _has_no_recipe(self, argument: object) -> bool:
        return isinstance(argument, torch.Tensor) and self._recipes.get(argument) is None

    def _forget_written(self, operator: Any, arguments: tuple[Any, dict[str, Any]]) -> None:
        """Forget the recipes of what lies in memory that an operator wrote to; others stay true.

        A recipe reads inputs as they are when a call begins.
        """
        for written in _written_tensors(operator, arguments):
            storage = torch_compat.storage_key(written)
            if storage in self._storages:
                for tensor in list(self._recipes):
                    if torch_compat.storage_key(tensor) == storage:
                        self._recipes[tensor] = None

    def _recipe_of(self, operator: Any, arguments: tuple[Any, dict[str, Any]]) -> GivenInput | Recipe | None:
        """Return the recipe of an operator's first result; None if an argument has none."""
        if operator is aten.lift_fresh.default:
            return _recipe_of_new(arguments[0][0])
        # First what most operators end at, and is looked up fast.
        if operator not in _LIKE and any(self._has_no_recipe(argument) for argument in arguments[0]):
            return None
        if schema_of(operator).is_mutable or not _is_deterministic(operator) or _nests_results(operator):
            return None
        leaves, spec = pytree.tree_flatten(arguments)
        sources: list[Any] = []
        depth = 0
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = _recipe_like(leaf) if operator in _LIKE else self._recipes.get(leaf)
                if leaf is None:
                    return None
                depth = max(depth, leaf.depth + 1)
            elif isinstance(leaf, torch_compat.SYMBOLIC) and not torch_compat.is_size(leaf):
                return None
            sources.append(leaf)
        if depth >= _MAX_DEPTH:
            return None
        if operator in _IDENTITIES or _takes_everything(operator, arguments[0]):
            kept: GivenInput | Recipe = sources[0]
            return kept
        return Recipe(operator, pytree.tree_unflatten(sources, spec), 0, depth)


def _of_result(recipe: GivenInput | Recipe | None, index: int) -> GivenInput | Recipe | None:
    return replace(recipe, result=index) if index and isinstance(recipe, Recipe) else recipe


def _elements(tensor: torch.Tensor) -> int:
    """Return how many elements a tensor has; if its sizes vary, at the hints."""
    return math.prod(map(torch_compat.hint_of, tensor.shape))


def _takes_everything(operator: Any, arguments: Sequence[Any]) -> bool:
    """Return True for a slice of everything: Python leaves it out if sizes are numbers."""
    if operator is not aten.slice.Tensor:
        return False
    given = [*arguments[1:], *(0, None, None, 1)[len(arguments) - 1 :]]
    dim, start, end, step = given
    if not (start is None or torch_compat.is_same_size(start, 0)) or step != 1:
        return False
    is_last = end is None or torch_compat.is_same_size(end, _TO_THE_END)
    return is_last or torch_compat.is_same_size(end, arguments[0].shape[dim])


def _is_deterministic(operator: Any) -> bool:
    """Return True if an operator's results are neither random nor uninitialised."""
    return torch.Tag.nondeterministic_seeded not in operator.tags and "empty" not in schema_of(operator).name


def _nests_results(operator: Any) -> bool:
    """Return True if an operator returns lists among other results."""
    returns = schema_of(operator).returns
    return len(returns) > 1 and any(str(item.type).startswith("List") for item in returns)


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


def _recipe_of_new(tensor: torch.Tensor) -> Recipe | None:
    """Return the recipe of a tensor that Python has just made of numbers; None for a large one."""
    if (
        type(tensor) is not torch.Tensor
        or not torch_compat.has_values(tensor)
        or tensor.numel() > _MAX_NUMBERS
    ):
        return None
    with torch_compat.real_tensors():
        numbers = tensor.tolist()
    return Recipe(torch.tensor, ((numbers,), {"dtype": tensor.dtype, "device": tensor.device}))


def _recipe_like(tensor: torch.Tensor) -> Recipe | None:
    """Return the recipe of some tensor of the same shape, layout and type."""
    if not all(map(torch_compat.is_size, (*tensor.shape, *tensor.stride()))):
        return None
    layout = (tuple(tensor.shape), tensor.stride())
    return Recipe(aten.empty_strided.default, (layout, {"dtype": tensor.dtype, "device": tensor.device}))
