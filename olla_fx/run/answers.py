"""Tells plans for calls of one kind apart by what Python would be answered about their inputs."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._guard = QuestionGuard(questions) if questions else None
        self._micro_batches = micro_batches

    def other(self, examples: Sequence[torch.Tensor]) -> Answer | None:
        """Return the first answer of a call that is another than the plan's; None if all are the same.

        All micro-batches of a call have to answer as the plan does.

        Args:
            examples: the tensors among the call's inputs, of the plan's kinds.
        """
        if self._guard is None:
            return None
        for part in micro_batches(examples, self._micro_batches):
            try:
                other = self._guard.first_other(part)
            except (IndexError, RuntimeError) as error:
                # Eager raises this, too, where the model asks: capturing such a call explains it.
                return "", type(error).__name__, f"a question about the inputs raised {type(error).__name__}"
            if other is not None:
                index, answer = other
                question = self._guard.questions[index]
                return question.key, repr(answer), question.said_of(answer)
        return None
