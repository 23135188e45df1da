"""Tells plans for calls of one kind apart by what Python would be answered about their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from olla_fx.capture.gradients import micro_batches
from olla_fx.guards import Question, QuestionGuard
from olla_fx.guards.questions import LEAST_COUNT


class Answer(NamedTuple):
    """An answer that is another than a plan's.

    Attributes:
        key: of the question.
        text: the answer.
        sentence: about this and the one that was planned for.
        is_number: True if both are whole numbers, which may be counts.
    """

    key: str
    text: str
    sentence: str
    is_number: bool = False

    def kind(self, *, counts: bool) -> tuple[str, str]:
        """Return what calls that answer alike share; all ``counts`` are alike if they may be symbols."""
        return self.key, "a number" if counts and self.is_number else self.text


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
        self._texts = [
            (question.recipe.key, repr(question.answer) if question.count is None else None)
            for question in questions
        ]
        self._micro_batches = micro_batches

    @property
    def has_numbers(self) -> bool:
        """True if a whole number of at least 2 is among them."""
        return any(type(asked.answer) is int and asked.answer >= LEAST_COUNT for asked in self._questions)

    def counts(self, examples: Sequence[torch.Tensor], heard: dict[str, str]) -> tuple[int, ...] | None:
        """Return the counts that a call's inputs give; None if they do not give the plan's answers.

        Args:
            examples: as of :meth:`other`.
            heard: what the inputs have answered other plans, by the questions' recipes; more is noted.
        """
        told = [heard.get(key) for key, _ in self._texts]
        pairs = list(zip(told, self._texts, strict=True))
        if any(known is not None and text is not None and known != text for known, (_, text) in pairs):
            return None
        counts = [int(known) for known, (_, text) in pairs if text is None and known is not None]
        if any(count < LEAST_COUNT for count in counts):
            return None
        if None not in told:
            return tuple(counts)
        numbers: tuple[int, ...] = ()
        for part in micro_batches(examples, self._micro_batches):
            index, answer = self._ask(part)
            if index is not None:
                heard.update((key, text) for key, text in self._texts[:index] if text is not None)
                heard[self._texts[index][0]] = repr(answer)
                return None
            numbers = answer
        return numbers

    def other(self, examples: Sequence[torch.Tensor]) -> Answer | None:
        """Return the first answer of a call that is another than the plan's; None if all are the same.

        All micro-batches of a call have to answer as the plan does.

        Args:
            examples: the tensors among the call's inputs, of the plan's kinds.
        """
        for part in micro_batches(examples, self._micro_batches):
            index, answer = self._ask(part)
            if index is not None:
                question = self._questions[index]
                if isinstance(answer, Exception):
                    # Eager raises this, too, where the model asks: capturing such a call explains it.
                    name = type(answer).__name__
                    return Answer("", name, f"a question about the inputs raised {name}")
                is_number = type(answer) is type(question.answer) is int
                return Answer(question.key, repr(answer), question.said_of(answer), is_number)
        return None

    def _ask(self, inputs: Sequence[torch.Tensor]) -> tuple[int | None, Any]:
        """Return the first question whose answer is another, and that answer, or an error of asking.

        Without one, None and the counts.
        """
        if self._guard is None:
            return None, ()
        try:
            return self._guard.ask(inputs)
        except (IndexError, RuntimeError) as error:
            return 0, error
