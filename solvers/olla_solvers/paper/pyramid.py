"""Preplaces spans in the shape of a pyramid: OLLA §4.5, Function 5.

A training step's activations nest: the earlier one is made, the later it is freed. The array with the longest
lifetime goes to the bottom, on it the longest one within that lifetime, and so on to the top. Spans outside
the pyramid are left to another method (in OLLA, to the integer program).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from olla_solvers.place.skyline import Walls
from olla_solvers.plan import Span


def pyramid(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Give the spans of the pyramid their offsets.

    Args:
        spans: rectangles; those with an offset keep it, and the pyramid goes around them.

    Returns:
        The same spans in the same sequence; those of the pyramid with an offset.
    """
    placed = list(spans)
    walls = Walls(spans)
    waiting = [i for i, span in enumerate(spans) if span.offset is None and span.size_bytes > 0]
    base = 0
    while waiting:
        index = max(waiting, key=lambda i: spans[i].upper - spans[i].lower)
        span = spans[index]
        base = walls.lowest_clear(span, base)
        placed[index] = replace(span, offset=base)
        base += span.size_bytes
        waiting = [
            i for i in waiting if i != index and span.lower <= spans[i].lower and spans[i].upper <= span.upper
        ]
    return tuple(placed)
