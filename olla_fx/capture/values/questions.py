"""Answers what Python asks about the values of inputs while a step is captured, from the example.

The traced tensors hold no values. A question whose recipe (:class:`olla_fx.guards.Recipe`) reads nothing but
inputs is answered by computing it from the tensors of the example, which are only read. It is kept with its
answer, in the order in which Python asked; a later one may exist only because of what was answered before.
A step may run several times while it is captured (first for what it returns, say); a question is kept once.

Where a step runs in micro-batches, each of them is asked, and all must give the same answer, since one graph
serves them all. An example without values (fake tensors, or on the meta device) gives no answers, unless they
are known from an earlier capture.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.capture.gradients import micro_batches
from olla_fx.capture.types import StepRequest
from olla_fx.errors import CaptureError
from olla_fx.guards import Question, Recipe
from olla_fx.torch_compat import pytree

_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")


class Questions:
    """The questions that one capture asks, and who answers them.

    Attributes:
        asks_numbers: True if numbers are asked for at once; else they stay open, as symbols that the graph
            computes with at every call, until one turns out to decide control flow or a shape.
        left_open: True if a number that could have been asked for was left open.
    """

    def __init__(self, request: StepRequest, *, asks_numbers: bool) -> None:
        """Start without questions.

        Args:
            request: whose example is asked.
            asks_numbers: see the attribute.

        Raises:
            CaptureError: if the batch cannot be cut into micro-batches.
        """
        self.asks_numbers = asks_numbers
        self.left_open = False
        leaves = pytree.tree_leaves(request.inputs)
        self._batches = [
            [_plain(leaf) for leaf in part if isinstance(leaf, torch.Tensor)]
            for part in micro_batches(leaves, request.options.accumulation_steps)
        ]
        self._known = request.answers
        self._asked: dict[str, Question] = {}

    @property
    def asked(self) -> tuple[Question, ...]:
        """All questions so far, in order."""
        return tuple(self._asked.values())

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Answer without noting what is asked, in a run with numbers as sizes before one with symbols."""
        asked = dict(self._asked)
        yield
        self._asked = asked

    def leaves_open(self, number: Recipe) -> bool:
        """Return True if a number is not to be answered now; note that it was left open."""
        is_open = bool(number.inputs) and not self.asks_numbers and number.key not in self._known
        self.left_open |= is_open
        return is_open

    def answer(self, recipe: Recipe) -> Any:
        """Return the answer to a question; note both.

        Args:
            recipe: its result is a Python value.

        Raises:
            CaptureError: if the example has no values to answer it, or micro-batches answer differently.
        """
        if not recipe.inputs and not recipe.has_sizes:
            return recipe.evaluate((), torch.device("cpu"))
        question = self._asked.get(recipe.key)
        if question is None:
            answer, frame = self._find_answer(recipe), _asking_frame()
            asker = frame.f_globals if frame is not None and type(answer) is int else None
            question = Question(recipe, answer, place_of_question(), recipe.key, asker)
            self._asked[recipe.key] = question
        return question.answer

    def _find_answer(self, recipe: Recipe) -> Any:
        if recipe.key in self._known:
            return self._known[recipe.key]
        if not recipe.inputs:
            return recipe.evaluate((), torch.device("cpu"))
        first = self._batches[0]
        missing = [index for index in sorted(recipe.inputs) if not torch_compat.has_values(first[index])]
        if missing:
            raise CaptureError(
                f"the model asks for the value of {recipe.words}{place_of_question()}, and input "
                f"{missing[0]} of the example has no values (it is a fake tensor, or on the meta device): "
                "give a real tensor in its place, such as one of the batches"
            )
        answers = [recipe.evaluate(batch) for batch in self._batches]
        for index, answer in enumerate(answers[1:], 2):
            if repr(answer) != repr(answers[0]):
                raise CaptureError(
                    f"the model asks for the value of {recipe.words}{place_of_question()}, which is "
                    f"{answers[0]!r} in the first micro-batch and {answer!r} in number {index}: one plan "
                    "serves all micro-batches of a step. Ask outside of the model, or accumulate in a loop "
                    "of your own"
                )
        return answers[0]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a plan receives it: without autograd, lazy conjugation and negation."""
    return tensor.detach().resolve_conj().resolve_neg() if torch_compat.has_values(tensor) else tensor


def known_answers(questions: tuple[Question, ...]) -> Mapping[str, Any]:
    """Return the answers to questions by the keys of their recipes, for a later request without values."""
    return {question.recipe.key: question.answer for question in questions}


def _asking_frame() -> types.FrameType | None:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    return frame


def place_of_question() -> str:
    """Return the innermost line on the stack that is neither torch's nor ours; empty without one."""
    frame = _asking_frame()
    if frame is None:
        return ""
    path = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f" ({path}, line {frame.f_lineno}: {line})"
