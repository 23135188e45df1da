"""One array after another, each into a hole between those that are placed: first fit and best fit.

SmartPool, "Efficient Memory Management for GPU-based Deep Learning Systems", §III-C: the largest array goes
first; first fit takes the lowest hole that is large enough, best fit the smallest one, and where no hole is,
the pool is extended at its top. The same walk in the sequence of births is what an allocator without a plan
does. Offsets that are given stay, and every hole begins at a multiple of the array's alignment.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.errors import InfeasibleError, OllaError
from olla_solvers.plan import Span
from olla_solvers.problem import Offset

Rule = Callable[[Span], tuple[int, ...]]
"""A sort key: the span with the smallest key goes first."""

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def by_size(span: Span) -> tuple[int, ...]:
    """The largest first; of equals the one that lives longest."""
    return (-span.size_bytes, span.lower - span.upper)


def by_birth(span: Span) -> tuple[int, ...]:
    """In the sequence of allocation; of those born together in the given sequence."""
    return (span.lower,)


class OutOfTimeError(OllaError):
    """A deadline came before every span had its place."""


def greedy(
    spans: Sequence[Span], rule: Rule, *, best_fit: bool = False, deadline: float = math.inf
) -> tuple[Offset, ...]:
    """Place spans one by one into a hole that is free throughout their lifetime.

    Args:
        spans: rectangles; those with an offset stay there and are placed before all others.
        rule: the sequence.
        best_fit: take the smallest sufficient hole instead of the lowest.
        deadline: on the monotonic clock.

    Returns:
        An offset for each span.

    Raises:
        InfeasibleError: when two given offsets collide.
        OutOfTimeError: when the deadline comes first.
    """
    sizes = np.array([span.size_bytes for span in spans], dtype=np.int64)
    bottom = np.zeros(len(spans), dtype=np.int64)
    placed = np.zeros(len(spans), dtype=bool)
    neighbours = _Neighbours(spans)
    check_given(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].offset is None, rule(spans[i]))):
        span = spans[index]
        if span.offset is not None:
            bottom[index] = span.offset
        elif span.size_bytes > 0:
            if time.monotonic() > deadline:
                raise OutOfTimeError(f"{len(spans)} spans were not placed by their deadline")
            others = neighbours.of(span)
            others = others[placed[others]]
            bottom[index] = _choose(span, bottom[others], sizes[others], best_fit)
        placed[index] = span.size_bytes > 0
    return tuple(int(offset) for offset in bottom)


class _Neighbours:
    """Finds what is alive with a span: classes of about equal lifetime, each sorted by birth.

    Within a class whose lifetimes are shorter than a width, what is alive with a span was born less than that
    before it, so a short stretch of the class holds it all.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        lower = np.array([span.lower for span in spans], dtype=np.int64)
        upper = np.array([span.upper for span in spans], dtype=np.int64)
        kind = np.frexp((upper - lower).astype(np.float64))[1]
        self._classes: list[tuple[int, Ints, Ints, Ints]] = []
        for each in np.unique(kind):
            members = np.flatnonzero(kind == each)
            members = members[np.argsort(lower[members], kind="stable")]
            width = int((upper[members] - lower[members]).max())
            self._classes.append((width, members, lower[members], upper[members]))

    def of(self, span: Span) -> Ints:
        """The indices of what is alive with a span, itself included."""
        found = []
        for width, members, lower, upper in self._classes:
            first, past = np.searchsorted(lower, (span.lower - width + 1, span.upper))
            if first < past:
                found.append(members[first:past][upper[first:past] > span.lower])
        return np.concatenate(found)


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
    """The indices of two spans whose given offsets overlap, if there are such.

    Those alive are kept by offset: while none of them collide, a new one hits a neighbour first.
    """
    given = [
        (i, (span.offset, span.offset + span.size_bytes, i))
        for i, span in enumerate(spans)
        if span.offset is not None and span.size_bytes > 0
    ]
    events = sorted(
        [(spans[i].lower, 1, extent) for i, extent in given]
        + [(spans[i].upper, 0, extent) for i, extent in given]
    )
    alive: list[tuple[int, int, int]] = []
    for _, is_birth, extent in events:
        position = bisect.bisect_left(alive, extent)
        if not is_birth:
            del alive[position]
            continue
        low, high, index = extent
        if position > 0 and alive[position - 1][1] > low:
            return alive[position - 1][2], index
        if position < len(alive) and alive[position][0] < high:
            return alive[position][2], index
        alive.insert(position, extent)
    return None


def _choose(span: Span, bottoms: Ints, sizes: Ints, best_fit: bool) -> Offset:
    """Where a span goes among others, which are placed."""
    order = np.argsort(bottoms, kind="stable")
    tops = np.maximum.accumulate(bottoms[order] + sizes[order])
    starts = np.concatenate([[0], -(-tops // span.alignment) * span.alignment])
    rooms = bottoms[order] - starts[:-1]
    holes = np.flatnonzero(rooms >= span.size_bytes)
    if len(holes) == 0:
        return int(starts[-1])
    return int(starts[holes[rooms[holes].argmin()] if best_fit else holes[0]])
