"""From an order to the rectangles that must be placed: planned arrays and workspaces."""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.analysis import lifetimes, timesteps
from olla_solvers.plan import Span
from olla_solvers.problem import Operator, OperatorIndex, Problem


def spans_of(problem: Problem, order: Sequence[OperatorIndex]) -> tuple[Span, ...]:
    """The spans of an order's planned arrays, in the problem's sequence, then of its workspaces.

    A workspace states no alignment of its own: it gets the largest one that any planned array asks for.

    Args:
        problem: the graph.
        order: operator indices, first to last.

    Returns:
        One span for each planned array and for each operator with a workspace.
    """
    alive = lifetimes(problem, order)
    arrays = [
        Span(
            array.name,
            alive[array.name].lower,
            alive[array.name].upper,
            array.size_bytes,
            array.alignment,
        )
        for array in problem.planned
    ]
    alignment = max((array.alignment for array in problem.planned), default=1)
    timestep = timesteps(order)
    taken = {array.name for array in problem.planned}
    workspaces = [
        Span(
            _free_name(f"workspace of {operator.name}", taken),
            timestep[index],
            timestep[index] + 1,
            operator.workspace_bytes,
            alignment,
        )
        for index, operator in scratching(problem)
    ]
    return (*arrays, *workspaces)


def scratching(problem: Problem) -> list[tuple[OperatorIndex, Operator]]:
    """The operators that have a workspace, with their indices."""
    return [(index, each) for index, each in enumerate(problem.operators) if each.workspace_bytes > 0]


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    return name
