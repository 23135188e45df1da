"""From an order to the rectangles that must be placed: planned arrays and workspaces."""

from __future__ import annotations

import math
from collections.abc import Sequence

from olla_solvers.analysis import lifetimes, timesteps
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Operator, OperatorIndex, Problem


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


def unit_bytes(spans: Sequence[Span]) -> Bytes:
    """A number of bytes of which all offsets in some lowest placement, and its height, are multiples.

    Some lowest placement has every span at the bottom, at its given offset, or on another one's top, raised
    to its alignment. Raising a multiple of the unit keeps it one where the alignment divides the unit or the
    unit the alignment, so the unit shrinks until each pair is of this kind.

    Args:
        spans: rectangles.

    Returns:
        The unit; it divides all sizes and given offsets.
    """
    given = (span.offset for span in spans if span.offset is not None)
    unit = math.gcd(*(span.size_bytes for span in spans), *given) or 1
    while crossing := [span.alignment for span in spans if unit % span.alignment and span.alignment % unit]:
        unit = math.gcd(unit, *crossing)
    return unit


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    return name
