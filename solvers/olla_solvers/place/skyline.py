"""The best-fit heuristic on a skyline of offset lines.

From "Profile-guided memory optimization for deep neural networks", §3.2, after Burke et al. 2004: take the
lowest offset line (leftmost of equals), put on it the span with the longest lifetime of those that fit
between its ends; if none fits, lift the line to its lowest neighbour and merge. Ties among equal
lifetimes are open in the paper, other rules than the longest lifetime may serve, and time may run in either
direction.

Unplaced spans are kept sorted by birth, so a line looks only at those born on it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from olla_solvers.plan import Span
from olla_solvers.problem import Offset, Timestep

Rule = Callable[[Span], tuple[int, ...]]
"""A sort key: of the spans that fit a line, the one with the smallest key goes there."""


def longest_lifetime(span: Span) -> tuple[int, ...]:
    """Return the key of the paper's rule; of equals the first in the list."""
    return (span.lower - span.upper,)


def largest_area(span: Span) -> tuple[int, ...]:
    """Return the key that sorts the largest product of lifetime and bytes first."""
    return ((span.lower - span.upper) * span.size_bytes,)


def earliest_birth(span: Span) -> tuple[int, ...]:
    """Return the key that sorts the earliest birth first; of equals the longest lifetime."""
    return (span.lower, span.lower - span.upper)


def skyline(spans: Sequence[Span], rule: Rule) -> tuple[Offset, ...]:
    """Place spans on the lowest line that takes them.

    If a given span is in the way, the span goes above it, and the line becomes as high.

    Args:
        spans: rectangles, each with at least one timestep; those with an offset stay there.
        rule: sort key of the spans that fit a line.

    Returns:
        An offset for each span, aligned. Spans without bytes are at 0.
    """
    offsets = [span.offset or 0 for span in spans]
    walls = Walls(spans)
    sized = sorted(
        (i for i, span in enumerate(spans) if span.size_bytes > 0 and span.offset is None),
        key=lambda i: spans[i].lower,
    )
    if not sized:
        return tuple(offsets)
    waiting = _Waiting([spans[i] for i in sized], rule)
    lines = _Lines(min(spans[i].lower for i in sized), max(spans[i].upper for i in sized))
    placed = 0
    while placed < len(sized):
        line = lines.lowest()
        position = waiting.take(lines.start[line], lines.end[line])
        if position is None:
            lines.lift(line)
            continue
        span = spans[sized[position]]
        offset = walls.lowest_clear(span, lines.offset[line])
        offsets[sized[position]] = offset
        lines.put(line, span.lower, span.upper, offset + span.size_bytes)
        placed += 1
    return tuple(offsets)


def reversed_time(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with time running backwards; a placement of these is one of those."""
    return [Span(s.name, -s.upper, -s.lower, s.size_bytes, s.alignment, s.offset) for s in spans]


class _Waiting:
    """Unplaced spans sorted by birth, asked for the first by rule within a line."""

    def __init__(self, spans: Sequence[Span], rule: Rule) -> None:
        self._lower = np.array([span.lower for span in spans], dtype=np.int64)
        self._upper = np.array([span.upper for span in spans], dtype=np.int64)
        self._rank = np.empty(len(spans), dtype=np.int64)
        self._rank[sorted(range(len(spans)), key=lambda i: rule(spans[i]))] = np.arange(len(spans))
        self._none = len(spans)
        self._never = int(self._upper.max()) + 1

    def take(self, start: Timestep, end: Timestep) -> int | None:
        """Remove and return the best span within ``[start, end)``, or None if there is none."""
        first, past = np.searchsorted(self._lower, (start, end))
        if first == past:
            return None
        ranks = np.where(self._upper[first:past] <= end, self._rank[first:past], self._none)
        best = int(ranks.argmin())
        if ranks[best] == self._none:
            return None
        position = int(first) + best
        self._upper[position] = self._never
        return position


class _Lines:
    """The offset lines: a chain of ``[start, end)`` pieces of time, each with its height."""

    def __init__(self, start: Timestep, end: Timestep) -> None:
        self.start, self.end, self.offset = [start], [end], [0]
        self._left: list[int] = [-1]
        self._right: list[int] = [-1]
        self._gone = [False]
        self._heap = [(0, start, 0)]

    def lowest(self) -> int:
        """Return the lowest line, the leftmost of equals."""
        while self._gone[self._heap[0][2]]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def put(self, line: int, lower: Timestep, upper: Timestep, top: Offset) -> None:
        """Raise the part ``[lower, upper)`` of a line to ``top``."""
        start, end, offset = self.start[line], self.end[line], self.offset[line]
        left, right = self._left[line], self._right[line]
        self._gone[line] = True
        pieces = [(start, lower, offset), (lower, upper, top), (upper, end, offset)]
        for piece_start, piece_end, height in pieces:
            if piece_start < piece_end:
                left = self._append(piece_start, piece_end, height, left)
        self._join(left, right)

    def lift(self, line: int) -> None:
        """Raise a line to its lowest neighbour and merge with every neighbour of that height."""
        left, right = self._left[line], self._right[line]
        height = min(self.offset[neighbour] for neighbour in (left, right) if neighbour >= 0)
        start, end = self.start[line], self.end[line]
        self._gone[line] = True
        if left >= 0 and self.offset[left] == height:
            self._gone[left] = True
            start, left = self.start[left], self._left[left]
        if right >= 0 and self.offset[right] == height:
            self._gone[right] = True
            end, right = self.end[right], self._right[right]
        self._join(self._append(start, end, height, left), right)

    def _append(self, start: Timestep, end: Timestep, offset: Offset, left: int) -> int:
        """Add a line to the right of ``left`` and return it."""
        line = len(self.start)
        self.start.append(start)
        self.end.append(end)
        self.offset.append(offset)
        self._left.append(-1)
        self._right.append(-1)
        self._gone.append(False)
        self._join(left, line)
        heapq.heappush(self._heap, (offset, start, line))
        return line

    def _join(self, left: int, right: int) -> None:
        if left >= 0:
            self._right[left] = right
        if right >= 0:
            self._left[right] = left


class Walls:
    """The given spans, which the others must not collide with."""

    def __init__(self, spans: Sequence[Span]) -> None:
        """Keep the spans that have an offset and bytes, by offset."""
        given = [(s.offset, s.offset + s.size_bytes, s) for s in spans if s.offset is not None]
        given = sorted((wall for wall in given if wall[0] < wall[1]), key=lambda wall: wall[:2])
        self._low = np.array([low for low, _, _ in given], dtype=np.int64)
        self._high = np.array([high for _, high, _ in given], dtype=np.int64)
        self._lower = np.array([span.lower for _, _, span in given], dtype=np.int64)
        self._upper = np.array([span.upper for _, _, span in given], dtype=np.int64)

    def lowest_clear(self, span: Span, offset: Offset) -> Offset:
        """Return the lowest aligned offset from ``offset`` on at which a span collides with no given one."""
        offset = -(-offset // span.alignment) * span.alignment
        if not len(self._low):
            return offset
        meets = (self._lower < span.upper) & (self._upper > span.lower) & (self._high > offset)
        for low, high in zip(self._low[meets].tolist(), self._high[meets].tolist(), strict=True):
            if low >= offset + span.size_bytes:
                break
            if offset < high:
                offset = -(-high // span.alignment) * span.alignment
        return offset
