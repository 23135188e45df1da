"""Recipes: how a value that Python asks for follows from the inputs of a call and from constants.

While a step is traced, each operator on inputs and constants leaves the :class:`Recipe` of its result: what
was called, and with which inputs, constants and other recipes. From it the value can be computed again for
the inputs of any call. Sizes that vary are replaced by the numbers of a call first; numbers that follow from
*counts*, which are not known before the call, are functions of these (:class:`FromCounts`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.fx_graph import Size
from olla_fx.torch_compat import pytree

_MOST_WORDS = 8
"""Operators of a recipe that a message names."""

_UNSPOKEN = frozenset(("detach", "alias", "_local_scalar_dense", "tolist", "clone"))
"""Operators that say nothing about a question."""


@dataclass(frozen=True)
class GivenInput:
    """The tensor at an index among the tensors of the caller's inputs."""

    index: int
    depth = 0
    has_sizes = False

    @property
    def inputs(self) -> frozenset[int]:
        """The inputs that it reads."""
        return frozenset((self.index,))

    @property
    def key(self) -> str:
        """A text that stands for it alone."""
        return f"input {self.index}"


@dataclass(frozen=True)
class Comparison:
    """Compares a number with a constant: the operator of a recipe.

    Attributes:
        relation: of :mod:`operator`, such as ``gt``.
        constant: its right side.
    """

    relation: Callable[..., bool]
    constant: float

    @property
    def __name__(self) -> str:
        """Its words in a message."""
        return f"{self.relation.__name__} {self.constant}"

    def __call__(self, number: float) -> bool:
        """Return True if a number is in this relation."""
        return self.relation(number, self.constant)


@dataclass(frozen=True, eq=False, repr=False)
class FromCounts:
    """A number that follows from counts, in a question that is asked after these.

    Attributes:
        function: gives it, of the sizes of the inputs and the counts.
        needed: the number of counts that it takes: the first ones.
        text: its formula.
        of_inputs: the sizes of the inputs.
    """

    function: Callable[..., tuple[int, ...]]
    needed: int
    text: str
    of_inputs: tuple[int, ...] = ()

    def at(self, of_inputs: Sequence[int]) -> FromCounts:
        """Return the same for some sizes of the inputs."""
        return replace(self, of_inputs=tuple(of_inputs))

    def __call__(self, *counts: int) -> int:
        """Return the number."""
        return self.function(*self.of_inputs, *counts)[0]

    def __repr__(self) -> str:
        """Return a text that is part of the key of a recipe."""
        return f"{self.text} at {self.of_inputs}"


@dataclass(frozen=True, eq=False)
class Recipe:
    """One result of an operator on inputs and constants.

    Attributes:
        operator: what is called.
        arguments: its arguments and keyword arguments, in which recipes and inputs stand for tensors. Numbers
            among these that follow from sizes that vary are symbols while the step is traced.
        result: index of the result among the operator's results.
        depth: the number of operators below it.
    """

    operator: Any
    arguments: tuple[Any, dict[str, Any]]
    result: int = 0
    depth: int = 0

    @functools.cached_property
    def inputs(self) -> frozenset[int]:
        """The indices of the inputs that it reads."""
        return frozenset().union(*(source.inputs for source in self._sources))

    @functools.cached_property
    def has_sizes(self) -> bool:
        """True if it is computed with sizes that vary."""
        leaves = pytree.tree_leaves(self.arguments)
        return any(isinstance(leaf, torch.SymInt | Size) for leaf in leaves) or any(
            source.has_sizes for source in self._sources
        )

    @functools.cached_property
    def has_counts(self) -> bool:
        """True if it is computed with numbers that are not known before a call."""
        leaves = pytree.tree_leaves(self.arguments)
        return any(isinstance(leaf, FromCounts) for leaf in leaves) or any(
            isinstance(source, Recipe) and source.has_counts for source in self._sources
        )

    @property
    def _sources(self) -> list[GivenInput | Recipe]:
        leaves = pytree.tree_leaves(self.arguments)
        return [leaf for leaf in leaves if isinstance(leaf, GivenInput | Recipe)]

    def with_numbers(self, number: Callable[[Any], Any], known: dict[int, Any] | None = None) -> Recipe:
        """Return the same with every size that varies replaced.

        Args:
            number: gives what takes the place of a size, and other values as they are.
            known: arguments that were replaced, by the identity of what they were.
        """
        if not self.has_sizes:
            return self
        known = {} if known is None else known

        def replaced(leaf: Any) -> Any:
            return leaf.with_numbers(number, known) if isinstance(leaf, Recipe) else number(leaf)

        identity = id(self.arguments)
        if identity not in known:
            known[identity] = pytree.tree_map(replaced, self.arguments)
        return replace(self, arguments=known[identity])

    @functools.cached_property
    def key(self) -> str:
        """A text that two recipes share exactly if they compute the same."""
        leaves, spec = pytree.tree_flatten(self.arguments)
        texts = [leaf.key if isinstance(leaf, GivenInput | Recipe) else repr(leaf) for leaf in leaves]
        text = "\n".join((str(self.operator), str(self.result), str(spec), *texts))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def evaluate(self, inputs: Sequence[torch.Tensor], device: torch.device | None = None) -> Any:
        """Compute the result, beneath all modes.

        Args:
            inputs: the tensors of the caller's inputs; they are not changed.
            device: where new constants are made; None for where the operators were told to.
        """
        with torch_compat.real_tensors():
            return self._evaluate(inputs, device, {})

    def _evaluate(
        self, inputs: Sequence[torch.Tensor], device: torch.device | None, results: dict[int, Any]
    ) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, Recipe):
                return leaf._evaluate(inputs, device, results)
            if isinstance(leaf, GivenInput):
                return inputs[leaf.index]
            if device is not None and isinstance(leaf, torch.device):
                return device
            return torch_compat.hint_of(leaf)

        identity = id(self.arguments)
        if identity not in results:
            args, kwargs = pytree.tree_map(value, self.arguments)
            results[identity] = self.operator(*args, **kwargs)
        return results[identity][self.result] if self.has_several_results else results[identity]

    @functools.cached_property
    def has_several_results(self) -> bool:
        """True if the operator returns a tuple or a list of tensors."""
        if not isinstance(self.operator, torch_compat.OpOverload):
            return False
        returns = torch_compat.schema_of(self.operator).returns
        return len(returns) > 1 or (len(returns) == 1 and str(returns[0].type).startswith("List"))

    @property
    def words(self) -> str:
        """The operators from an input to the result: ``input 1 → eq → all``."""
        names: list[str] = []
        recipe: Recipe | GivenInput | None = self
        while isinstance(recipe, Recipe):
            name = torch_compat.plain_name(recipe.operator)
            if name not in _UNSPOKEN:
                names.append(name.strip("_"))
            recipe = next((source for source in recipe._sources if source.inputs), None)
        if len(names) > _MOST_WORDS:
            names[_MOST_WORDS:] = ["…"]
        source = "a constant" if recipe is None else f"input {recipe.index}"
        return " → ".join([source, *reversed(names)])
