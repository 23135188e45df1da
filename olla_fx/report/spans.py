"""Computes the rectangles of a plan: every array and workspace with its lifetime and its offset."""

from __future__ import annotations

from collections.abc import Iterator

from olla_solvers.plan import MemoryPlan, Span
from olla_solvers.problem import Offset, Problem
from olla_solvers.spans import spans_of


def placed_spans(problem: Problem, plan: MemoryPlan) -> Iterator[tuple[Span, Offset]]:
    """Yield each planned array and workspace with its offset in the buffer, in bytes."""
    workspaces = {f"workspace of {name}": offset for name, offset in plan.workspace_offsets.items()}
    offsets = {**plan.offsets, **workspaces}
    for span in spans_of(problem, problem.indices_of(plan.order)):
        yield span, offsets[span.name]
