"""Runs a training step in micro-batches: one plan for each part of the batch, then the update's.

Nothing that a micro-batch leaves in the buffer is read by the next one, so all run at the same addresses.
What they hand on lies outside: the model's buffers, the losses and outputs, and the accumulated gradients,
which are there for the length of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from olla_fx.capture import CapturedStep, Role
from olla_fx.capture.gradients import joined, micro_batches
from olla_fx.run.plan_cache import CachedPlan


def run_micro_batches(
    planned: CachedPlan,
    update: CachedPlan,
    values: list[Any],
    run: Callable[[CachedPlan, list[Any]], Any],
) -> Any:
    """Run a step part by part.

    Args:
        planned: for one micro-batch.
        update: for the update after the last one.
        values: of the placeholders but the accumulated gradients; of the examples the whole batch.
        run: runs a plan on the values of all its placeholders.

    Returns:
        The step's loss, with the outputs of all micro-batches if these are asked for.
    """
    captured = planned.executor.step.captured
    first = next(index for index, item in enumerate(captured.inputs) if item.role is Role.EXAMPLE)
    of_model, examples = values[:first], values[first:]
    gradients = _no_gradients(captured, planned)
    answers = []
    for part in micro_batches(examples, captured.micro_batches):
        results = run(planned, [*of_model, *part, *gradients])
        answers.append(captured.outputs.rebuild(results))
    run(update, [*of_model, *micro_batches(examples, captured.micro_batches)[0], *gradients])
    if isinstance(answers[0], tuple):
        losses, outputs = zip(*answers, strict=True)
        return sum(losses[1:], losses[0]), joined(outputs)
    return sum(answers[1:], answers[0])


def _no_gradients(captured: CapturedStep, planned: CachedPlan) -> list[torch.Tensor]:
    """Return tensors to accumulate gradients in.

    They begin with -0.0, since ``-0.0 + g`` is ``g`` with its sign, as if the first gradient was copied.
    """
    graphed = planned.graphed
    # A CUDA graph's are filled in later calls, whatever modes are on then.
    with torch.inference_mode(False), torch.no_grad():
        gradients = [] if graphed is None else graphed.gradients
        if not gradients:
            specs = [item.spec for item in captured.inputs if item.role is Role.GRADIENT]
            gradients.extend(spec.empty(meta_as=spec.device) for spec in specs if spec is not None)
        for gradient in gradients:
            gradient.fill_(-0.0)
    return gradients
