"""Tells plans for calls of one kind apart by what Python would be answered about their inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from olla_fx.capture import CapturedStep
from olla_fx.capture.gradients import micro_batches
from olla_fx.guards import QuestionGuard


class Answers:
    """The answers that a plan holds for."""

    def __init__(self, captured: CapturedStep) -> None:
        """Prepare the questions of a captured step."""
        self._guard = QuestionGuard(captured.questions) if captured.questions else None
        self._micro_batches = captured.micro_batches

    def other(self, examples: Sequence[torch.Tensor]) -> tuple[str, str, str] | None:
        """Return the first answer of a call that is another than the plan's; None if all are the same.

        Args:
            examples: the tensors among the call's inputs, of the plan's kinds.

        Returns:
            The question's key, the answer as text, and a sentence about both. All micro-batches of a call
            have to answer as the plan does.
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
                return question.recipe.key, repr(answer), question.said_of(answer)
        return None
