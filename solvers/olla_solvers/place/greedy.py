"""One array after another, each into a hole between those that are placed: first fit and best fit.

SmartPool, "Efficient Memory Management for GPU-based Deep Learning Systems", §III-C: the largest array goes
first; first fit takes the lowest hole that is large enough, best fit the smallest one, and where no hole is,
the pool is extended at its top. The same walk in the sequence of births is what an allocator without a plan
does. Offsets that are given stay, and every hole begins at a multiple of the array's alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.errors import InfeasibleError
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset

Rule = Callable[[Span], tuple[int, ...]]
"""A sort key: the span with the smallest key goes first."""

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

Hole: TypeAlias = tuple[Offset, Bytes | None]
"""Where an array could begin, and the bytes from there to the next array above, None at the top."""


def by_size(span: Span) -> tuple[int, ...]:
    """The largest first; of equals the one that lives longest."""
    return (-span.size_bytes, span.lower - span.upper)


def by_birth(span: Span) -> tuple[int, ...]:
    """In the sequence of allocation; of those born together in the given sequence."""
    return (span.lower,)


def greedy(spans: Sequence[Span], rule: Rule, *, best_fit: bool = False) -> tuple[Offset, ...]:
    """Place spans one by one into a hole that is free throughout their lifetime.

    Args:
        spans: rectangles; those with an offset stay there and are placed before all others.
        rule: the sequence.
        best_fit: take the smallest sufficient hole instead of the lowest.

    Returns:
        An offset for each span.

    Raises:
        InfeasibleError: when two given offsets collide.
    """
    lower = np.array([span.lower for span in spans], dtype=np.int64)
    upper = np.array([span.upper for span in spans], dtype=np.int64)
    sizes = np.array([span.size_bytes for span in spans], dtype=np.int64)
    bottom = np.zeros(len(spans), dtype=np.int64)
    placed = np.zeros(len(spans), dtype=bool)
    check_given(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].offset is None, rule(spans[i]))):
        span = spans[index]
        if span.offset is not None:
            bottom[index] = span.offset
        elif span.size_bytes > 0:
            others = np.flatnonzero(placed & (lower < span.upper) & (upper > span.lower))
            bottom[index] = _choose(span, bottom[others], sizes[others], best_fit)
        placed[index] = span.size_bytes > 0
    return tuple(int(offset) for offset in bottom)


def check_given(spans: Sequence[Span]) -> None:
    """Refuse given offsets that collide.

    Raises:
        InfeasibleError: naming two spans whose given offsets overlap.
    """
    clash = given_collision(spans)
    if clash is not None:
        one, other = (repr(spans[each].name) for each in clash)
        raise InfeasibleError(f"the given offsets of {one} and {other} overlap")


def given_collision(spans: Sequence[Span]) -> tuple[int, int] | None:
    """The indices of two spans whose given offsets overlap, if there are such."""
    given = sorted(
        (i for i, span in enumerate(spans) if span.offset is not None and span.size_bytes > 0),
        key=lambda i: spans[i].lower,
    )
    alive: list[int] = []
    for index in given:
        span = spans[index]
        alive = [each for each in alive if spans[each].upper > span.lower]
        for each in alive:
            other = spans[each]
            low, other_low = span.offset or 0, other.offset or 0
            if low < other_low + other.size_bytes and other_low < low + span.size_bytes:
                return each, index
        alive.append(index)
    return None


def _choose(span: Span, bottoms: Ints, sizes: Ints, best_fit: bool) -> Offset:
    """Where a span goes among others, which are placed."""
    holes = _holes(span, bottoms, sizes)
    if best_fit:
        closed = [(room, offset) for offset, room in holes if room is not None]
        return min(closed)[1] if closed else holes[-1][0]
    return holes[0][0]


def _holes(span: Span, bottoms: Ints, sizes: Ints) -> list[Hole]:
    """The holes that a span fits into, ascending; the last one is the top."""
    holes: list[Hole] = []
    offset = 0
    for index in np.argsort(bottoms, kind="stable"):
        room = int(bottoms[index]) - offset
        if room >= span.size_bytes:
            holes.append((offset, room))
        top = int(bottoms[index] + sizes[index])
        offset = max(offset, -(-top // span.alignment) * span.alignment)
    holes.append((offset, None))
    return holes
