"""Spans, the rectangles that are placed: made from an order, and measured.

A span is bytes by time: a planned array or a workspace with its lifetime. ``checks.py`` refuses spans that
cannot be placed; ``table.py`` reads and writes them as comma-separated values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from olla_solvers.analysis import Range, host_lifetimes, lifetimes, timesteps
from olla_solvers.plan import Span
from olla_solvers.problem import Array, Bytes, Offset, Operator, OperatorIndex, Problem, Timestep


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
    spans = [_span(array, alive[array.name]) for array in problem.planned]
    alignment = max((array.alignment for array in problem.planned), default=1)
    timestep = timesteps(order)
    taken = {array.name for array in problem.planned}
    for index, operator in scratching(problem):
        name = f"workspace of {operator.name}"
        while name in taken:
            name += "'"
        first = timestep[index]
        spans.append(Span(name, first, first + 1, operator.workspace_bytes, alignment))
    return tuple(spans)


def host_spans_of(problem: Problem, order: Sequence[OperatorIndex]) -> tuple[Span, ...]:
    """Return the spans of the arrays that wait on the host, in the problem's sequence.

    Args:
        problem: the graph.
        order: operator indices, first to last.
    """
    alive = host_lifetimes(problem, order)
    return tuple(_span(array, alive[array.name]) for array in problem.on_host)


def _span(array: Array, alive: Range) -> Span:
    return Span(array.name, alive.lower, alive.upper, array.size_bytes, array.alignment)


def scratching(problem: Problem) -> list[tuple[OperatorIndex, Operator]]:
    """Return the operators that have a workspace, with their indices."""
    return [pair for pair in enumerate(problem.operators) if pair[1].workspace_bytes > 0]


def height_bytes(spans: Sequence[Span], offsets: Sequence[Offset]) -> Bytes:
    """Return the end of the topmost span."""
    return max((offset + span.size_bytes for span, offset in zip(spans, offsets, strict=True)), default=0)


def max_live_bytes(spans: Sequence[Span]) -> Bytes:
    """Return the lower bound of placement: the most bytes alive at one timestep.

    No two spans alive together may share a byte, so no placement is lower (OLLA §4.4 calls a placement of
    this height free of fragmentation). Nor is one lower than the top of the highest span with a given offset.

    Args:
        spans: rectangles with half-open lifetimes.

    Returns:
        Bytes that every placement needs.
    """
    changes: dict[Timestep, Bytes] = {}
    most = 0
    for span in spans:
        changes[span.lower] = changes.get(span.lower, 0) + span.size_bytes
        changes[span.upper] = changes.get(span.upper, 0) - span.size_bytes
        if span.offset is not None:
            most = max(most, span.offset + span.size_bytes)
    alive = 0
    for _, change in sorted(changes.items()):
        alive += change
        most = max(most, alive)
    return most


def unit_bytes(spans: Sequence[Span]) -> Bytes:
    """Return a number of bytes of which all offsets in some lowest placement, and its height, are multiples.

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
