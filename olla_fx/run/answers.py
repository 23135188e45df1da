"""Tells plans for calls of one kind apart by what Python would be answered about their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from olla_fx.capture.gradients import micro_batches
from olla_fx.guards import Question, QuestionGuard

Answer = tuple[str, str, str]
"""A question's key, an answer as text, and a sentence about this and the one that was planned for."""


class Answers:
    """The answers that a plan holds for."""

    def __init__(self, questions: Sequence[Question], micro_batches: int = 1) -> None:
        """Prepare the questions.

        Args:
            questions: of a captured step.
            micro_batches: the number of parts of a batch, each of which is asked.
        """
        self._questions = tuple(questions)
        self._guard = QuestionGuard(questions) if questions else None
        self._texts = [(question.recipe.key, repr(question.answer)) for question in questions]
        self._micro_batches = micro_batches

    def agree(self, examples: Sequence[torch.Tensor], heard: dict[str, str]) -> bool:
        """Return True if a call's inputs give the plan's answers.

        Args:
            examples: as of :meth:`other`.
            heard: what the inputs have answered other plans, by the questions' recipes; more is noted.
        """
        told = [heard.get(key) for key, _ in self._texts]
        pairs = zip(told, self._texts, strict=True)
        if any(known is not None and known != text for known, (_, text) in pairs):
            return False
        if None not in told:
            return True
        for part in micro_batches(examples, self._micro_batches):
            other = self._first_other(part)
            if other is not None:
                index, answer = other
                heard.update(self._texts[:index])
                heard[self._texts[index][0]] = repr(answer)
                return False
        return True

    def other(self, examples: Sequence[torch.Tensor]) -> Answer | None:
        """Return the first answer of a call that is another than the plan's; None if all are the same.

        All micro-batches of a call have to answer as the plan does.

        Args:
            examples: the tensors among the call's inputs, of the plan's kinds.
        """
        for part in micro_batches(examples, self._micro_batches):
            other = self._first_other(part)
            if other is not None:
                index, answer = other
                question = self._questions[index]
                if isinstance(answer, Exception):
                    # Eager raises this, too, where the model asks: capturing such a call explains it.
                    name = type(answer).__name__
                    return "", name, f"a question about the inputs raised {name}"
                return question.key, repr(answer), question.said_of(answer)
        return None

    def _first_other(self, inputs: Sequence[torch.Tensor]) -> tuple[int, Any] | None:
        """Return the first question whose answer is another, and that answer, or an error of asking."""
        if self._guard is None:
            return None
        try:
            return self._guard.first_other(inputs)
        except (IndexError, RuntimeError) as error:
            return 0, error
