"""Questions that Python asks about the values of inputs, and the test of later inputs by their answers.

``mask.all()`` decides which operators a model runs. Where it follows from the inputs alone, a plan holds for
one answer: the question's recipe (:mod:`olla_fx.guards.recipes`) is kept with its answer, and is computed
from the inputs of every later call. All questions of a plan become one flat Python function over the
recipes' operators, in the order in which they were asked; it ends at the first answer that is another, since
a later question may make no sense then.

Where a number that Python asks for is a symbol of the captured graph, a *count*, any number of at least 2
will do: the function hands it back, and computes with it where later questions do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.guards.recipes import FromCounts, GivenInput, Recipe

aten = torch.ops.aten

_MOST_ELEMENTS_KEPT = 1 << 16
"""Elements of a constant that is computed once."""

_QUICK: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: torch.Tensor.item,
    aten.equal.default: torch.equal,
    **{
        getattr(getattr(aten, name), overload): getattr(torch, name)
        for name in (
            "all",
            "any",
            "sum",
            "count_nonzero",
            "eq",
            "ne",
            "gt",
            "lt",
            "ge",
            "le",
            "cumsum",
            "sub",
        )
        for overload in getattr(aten, name).overloads()
        if overload in ("default", "dim", "dim_IntList", "Scalar", "Tensor")
    },
}
"""PyTorch's functions for operators, of the same arguments, which are called faster."""


@dataclass(frozen=True, eq=False)
class Question:
    """A value that Python asked for while a step was captured.

    Attributes:
        recipe: how it follows from the inputs.
        answer: what it was: a number, a truth value, or a list of these.
        place: the line of the user's code that asked.
        key: tells it from others that were asked meanwhile, whatever the sizes.
        asker: the global variables of the function that asked, if it asked for a number.
        count: if any number of at least 2 will do, its index among the counts; else None.
    """

    recipe: Recipe
    answer: Any
    place: str
    key: str
    asker: dict[str, Any] | None = None
    count: int | None = None

    def with_numbers(self, number: Callable[[Any], Any]) -> Question:
        """Return the same with every size in its recipe replaced; see :meth:`Recipe.with_numbers`."""
        return replace(self, recipe=self.recipe.with_numbers(number))

    def said_of(self, answer: object) -> str:
        """Return a sentence about another answer."""
        return f"{self.recipe.words} is {_short(answer)}, and was {_short(self.answer)}{self.place}"


def _short(answer: object) -> str:
    text = repr(answer)
    return text if len(text) <= 40 else f"{text[:40]}…"


LEAST_COUNT = 2
"""Counts of 0 and 1 are special, like such sizes."""

Listener = Callable[[Sequence[torch.Tensor]], tuple[int | None, Any]]
"""Asks inputs all questions; returns the index of the first one with another answer, and that; or None and
the counts."""


class QuestionGuard:
    """Asks the inputs of later calls what was asked while capturing.

    Attributes:
        questions: in the order in which they were asked.
        source: the text of the generated function.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        """Write and compile the function."""
        self.questions = tuple(questions)
        writer = _Writer()
        for index, question in enumerate(self.questions):
            writer.write(index, question)
        self.source = "\n".join([*writer.lines, f"    return None, {writer.counts()}", ""])
        exec(compile(self.source, "<questions about inputs>", "exec"), writer.objects)
        self._ask: Listener = writer.objects["ask"]

    def ask(self, inputs: Sequence[torch.Tensor]) -> tuple[int | None, Any]:
        """Return the index of the first question whose answer is another, and this answer.

        Args:
            inputs: the tensors of the call, of the kinds that were planned for.

        Returns:
            If there is none, None and the counts.
        """
        return torch_compat.on_real_tensors(self._ask, inputs)


class _Writer:
    """Text under construction, and the objects that it names."""

    def __init__(self) -> None:
        self.lines = ["def ask(inputs):"]
        self.objects: dict[str, Any] = {}
        self._counts = 0
        self._locals: dict[str, str] = {}

    def write(self, index: int, question: Question) -> None:
        """Ask a question, and return unless the answer is the same."""
        answer = question.answer
        given = self._value(question.recipe)
        if question.count is not None:
            self.lines.append(f"    n{question.count} = {given}")
            condition = f"n{question.count} < {LEAST_COUNT}"
            self._counts += 1
        elif isinstance(answer, bool):
            condition = f"{given} is not {answer}"
        elif isinstance(answer, int):
            condition = f"{given} != {answer}"
        elif isinstance(answer, float):  # not by its value: NaN is itself, 0.0 is not -0.0
            condition = f"{given}.hex() != {answer.hex()!r}"
        else:
            condition = f"repr({given}) != {repr(answer)!r}"
        self.lines += [f"    if {condition}:", f"        return {index}, {given}"]

    def counts(self) -> str:
        """Return a tuple of the counts."""
        return f"({''.join(f'n{index}, ' for index in range(self._counts))})"

    def _value(self, recipe: Recipe) -> str:
        """Return the local name of a recipe's result, computed before if it is new."""
        call = _called(recipe)
        if call not in self._locals:
            text = self._constant(recipe) or self._call(recipe)
            self._locals[call] = f"t{len(self._locals)}"
            self.lines.append(f"    {self._locals[call]} = {text}")
        return self._locals[call] + (f"[{recipe.result}]" if recipe.has_several_results else "")

    def _constant(self, recipe: Recipe) -> str | None:
        """Return the name of a constant, computed now; None for a large one, and what depends on inputs."""
        if recipe.inputs or recipe.has_several_results or recipe.has_counts:
            return None
        value = recipe.evaluate(())
        is_large = isinstance(value, torch.Tensor) and value.numel() > _MOST_ELEMENTS_KEPT
        return None if is_large else self._object(value)

    def _call(self, recipe: Recipe) -> str:
        args, kwargs = recipe.arguments
        function = _QUICK.get(recipe.operator) or torch_compat.direct_call(recipe.operator)
        if recipe.operator is aten._to_copy.default and kwargs.keys() in ({"dtype"}, {"dtype", "device"}):
            function = torch.Tensor.to
        name = self._object(function)
        texts = [self._argument(argument) for argument in args]
        texts += [f"{key}={self._argument(argument)}" for key, argument in kwargs.items()]
        return f"{name}({', '.join(texts)})"

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, GivenInput):
            return f"inputs[{argument.index}]"
        if isinstance(argument, Recipe):
            return self._value(argument)
        if isinstance(argument, list | tuple):
            inner = ", ".join(self._argument(item) for item in argument)
            return f"[{inner}]"
        if isinstance(argument, FromCounts):
            counts = ", ".join(f"n{index}" for index in range(argument.needed))
            return f"{self._object(argument)}({counts})"
        return self._object(argument)

    def _object(self, value: Any) -> str:
        if type(value) in (int, bool, type(None)):
            return repr(value)
        name = f"c{len(self.objects)}"
        self.objects[name] = value
        return name


def _called(recipe: Recipe) -> str:
    """Return a text that results of one call share."""
    return recipe.key if recipe.result == 0 else Recipe(recipe.operator, recipe.arguments).key
