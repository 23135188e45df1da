"""What a run holds while it waits for its backward, and a placement that leaves the rest in one piece."""

from __future__ import annotations

from dataclasses import replace

from olla_fx.compile import CompiledStep
from olla_fx.fx_graph import end_of_backward, forward_backward_boundary
from olla_solvers.pauses import held_at, place_at_ends
from olla_solvers.problem import Offset

WASTE = 0.01
"""So much larger may a buffer be if other plans can run in it meanwhile."""


def held_while_waiting(step: CompiledStep) -> tuple[Offset, Offset]:
    """Return the addresses between which everything lies that is alive at the forward/backward boundary."""
    boundary = _operator(step, forward_backward_boundary)
    return (0, 0) if boundary is None else held_at(step.plan.problem, step.plan.memory, boundary)


def gathered(step: CompiledStep) -> CompiledStep | None:
    """Place a step's arrays again: activations that wait lie lowest, gradients that are left highest.

    Args:
        step: compiled with the operators' workspaces.

    Returns:
        The step with other offsets; None if there is nothing to gather, or it would cost too much.
    """
    boundary = _operator(step, forward_backward_boundary)
    end = _operator(step, end_of_backward) if step.dataflow.gradients.kept else None
    memory = step.plan.memory
    most_bytes = int((1 + WASTE) * memory.buffer_bytes)
    moved = place_at_ends(step.plan.problem, memory, boundary, end, most_bytes)
    if moved is None:
        return None
    return replace(step, plan=replace(step.plan, memory=moved), emitted=step.emitted.with_offsets(moved))


def _operator(step: CompiledStep, target: object) -> str | None:
    operators = zip(step.dataflow.operators, step.plan.problem.operators, strict=True)
    return next((operator.name for node, operator in operators if node.target is target), None)
