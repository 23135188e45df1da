"""Places a plan's arrays so that other plans can run in the rest of its buffer while it waits."""

from __future__ import annotations

from dataclasses import replace

from olla_fx.compiled import CompiledStep
from olla_fx.fx_graph import end_of_backward, forward_backward_boundary
from olla_solvers.pauses import place_at_ends

WASTE = 0.01
"""So much larger may a buffer be if other plans can run in it meanwhile."""


def gathered(step: CompiledStep) -> CompiledStep | None:
    """Place a step's arrays again: activations that wait lie lowest, gradients that are left highest.

    Args:
        step: compiled with the operators' workspaces.

    Returns:
        The step with other offsets; None if there is nothing to gather, or it would cost too much.
    """
    boundary = step.operator_of(forward_backward_boundary)
    end = step.operator_of(end_of_backward) if step.dataflow.gradients.kept else None
    memory = step.plan.memory
    most_bytes = int((1 + WASTE) * memory.buffer_bytes)
    budget_bytes = step.plan.memory_budget_bytes
    if budget_bytes is not None:
        room_bytes = max(0, budget_bytes - step.plan.needed_bytes)
        most_bytes = min(most_bytes, memory.buffer_bytes + room_bytes)
    moved = place_at_ends(step.plan.problem, memory, boundary, end, most_bytes)
    if moved is None:
        return None
    return replace(step, plan=replace(step.plan, memory=moved), emitted=step.emitted.with_offsets(moved))
