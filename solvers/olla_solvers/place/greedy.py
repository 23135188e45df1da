"""Places one span after another, each into a hole between the placed ones: first fit and best fit.

After SmartPool ("Efficient Memory Management for GPU-based Deep Learning Systems", §III-C): first fit takes
the lowest hole that is large enough, best fit the smallest one, and if there is none, the pool is extended at
its top. Offsets that are given stay, and every hole begins at a multiple of the span's alignment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.errors import OllaError
from olla_solvers.plan import Span
from olla_solvers.problem import Offset

Rule = Callable[[Span], tuple[int, ...]]
"""A sort key: the span with the smallest key goes first."""

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def by_size(span: Span) -> tuple[int, ...]:
    """Return the key that sorts the largest span first; of equals the one that lives longest."""
    return (-span.size_bytes, span.lower - span.upper)


class OutOfTimeError(OllaError):
    """Raised if a deadline comes before every span has its place; never leaves this package."""


def greedy(
    spans: Sequence[Span], rule: Rule, *, best_fit: bool = False, deadline: float = math.inf
) -> tuple[Offset, ...]:
    """Place spans one by one into a hole that is free throughout their lifetime.

    Args:
        spans: rectangles; those with an offset stay there and are placed before all others.
        rule: sort key of the sequence.
        best_fit: take the smallest sufficient hole instead of the lowest.
        deadline: on the monotonic clock.

    Returns:
        An offset for each span.

    Raises:
        OutOfTimeError: if the deadline comes first.
    """
    sizes = np.array([span.size_bytes for span in spans], dtype=np.int64)
    bottom = np.zeros(len(spans), dtype=np.int64)
    placed = np.zeros(len(spans), dtype=bool)
    neighbours = _Neighbours(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].offset is None, rule(spans[i]))):
        span = spans[index]
        if span.offset is not None:
            bottom[index] = span.offset
        elif span.size_bytes > 0:
            if time.monotonic() > deadline:
                raise OutOfTimeError(f"{len(spans)} spans were not placed by their deadline")
            others = neighbours.of(span)
            others = others[placed[others]]
            bottom[index] = choose_offset(span, bottom[others], sizes[others], best_fit=best_fit)
        placed[index] = span.size_bytes > 0
    return tuple(int(offset) for offset in bottom)


class _Neighbours:
    """Finds the spans alive with another: classes of about equal lifetime, each sorted by birth.

    In a class whose lifetimes are at most a width long, every span alive with another was born less than that
    width before it, so a short part of the class holds them all.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        lower = np.array([span.lower for span in spans], dtype=np.int64)
        upper = np.array([span.upper for span in spans], dtype=np.int64)
        kind = np.frexp((upper - lower).astype(np.float64))[1]
        self._classes: list[tuple[int, Ints, Ints, Ints]] = []
        for exponent in np.unique(kind):
            members = np.flatnonzero(kind == exponent)
            members = members[np.argsort(lower[members], kind="stable")]
            width = int((upper[members] - lower[members]).max())
            self._classes.append((width, members, lower[members], upper[members]))

    def of(self, span: Span) -> Ints:
        """Return the indices of the spans alive with a span, itself included."""
        neighbours = []
        for width, members, lower, upper in self._classes:
            first, past = np.searchsorted(lower, (span.lower - width + 1, span.upper))
            if first < past:
                neighbours.append(members[first:past][upper[first:past] > span.lower])
        return np.concatenate(neighbours)


def choose_offset(span: Span, bottoms: Ints, sizes: Ints, *, best_fit: bool = False) -> Offset:
    """Return the offset of a span among others, which are placed.

    Args:
        span: of at least one byte.
        bottoms: offsets of those that are alive with it.
        sizes: of the same.
        best_fit: take the smallest sufficient hole instead of the lowest.
    """
    order = np.argsort(bottoms, kind="stable")
    tops = np.maximum.accumulate(bottoms[order] + sizes[order])
    starts = np.concatenate([[0], -(-tops // span.alignment) * span.alignment])
    rooms = bottoms[order] - starts[:-1]
    holes = np.flatnonzero(rooms >= span.size_bytes)
    if len(holes) == 0:
        return int(starts[-1])
    return int(starts[holes[rooms[holes].argmin()] if best_fit else holes[0]])
