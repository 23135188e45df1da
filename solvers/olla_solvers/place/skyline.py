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
from olla_solvers.problem import Offset

FEW = 32
"""So many spans are looked at one by one sooner than all at once."""

_GONE = -1
"""The height of what is no line."""

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
    lines = _Lines(waiting.end)
    unplaced = len(sized)
    while unplaced:
        height, start, end = lines.lowest()
        position = waiting.take(start, end)
        if position is None:
            lines.lift(start)
            continue
        span = spans[sized[position]]
        offset = walls.lowest_clear(span, height)
        offsets[sized[position]] = offset
        lines.put(start, *waiting.lifetime(position), offset + span.size_bytes)
        unplaced -= 1
    return tuple(offsets)


def reversed_time(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with time running backwards; a placement of these is one of those."""
    return [Span(s.name, -s.upper, -s.lower, s.size_bytes, s.alignment, s.offset) for s in spans]


class _Waiting:
    """Unplaced spans sorted by birth, asked for the first by rule within a line.

    Time is counted in births and deaths: moment 0 is the first birth, and ``end`` the last death.
    """

    def __init__(self, spans: Sequence[Span], rule: Rule) -> None:
        count = len(spans)
        times = np.array([*(span.lower for span in spans), *(span.upper for span in spans)], dtype=np.int64)
        moments = np.unique(times, return_inverse=True)[1].reshape(2, count)
        self.end = int(moments.max())
        self._lower: list[int] = moments[0].tolist()
        self._upper: list[int] = moments[1].tolist()
        self._born_from: list[int] = np.searchsorted(moments[0], np.arange(self.end + 1)).tolist()
        ranks = np.empty(count, dtype=np.int64)
        ranks[sorted(range(count), key=lambda i: rule(spans[i]))] = np.arange(count)
        self._rank: list[int] = ranks.tolist()
        # A placed one gets an end that no line has. Lists serve where few are looked at, arrays where many.
        self._ends, self._ranks = self._upper.copy(), ranks
        self._ends_array = moments[1].copy()

    def lifetime(self, position: int) -> tuple[int, int]:
        """Return the first and the last moment of a span's life."""
        return self._lower[position], self._upper[position]

    def take(self, start: int, end: int) -> int | None:
        """Remove and return the best span within ``[start, end)``, or None if there is none."""
        first, past = self._born_from[start], self._born_from[end]
        none = best = len(self._rank)
        position = 0
        if past - first < FEW:
            ends, rank = self._ends, self._rank
            for candidate in range(first, past):
                if ends[candidate] <= end and rank[candidate] < best:
                    position, best = candidate, rank[candidate]
        else:
            ranks = np.where(self._ends_array[first:past] <= end, self._ranks[first:past], none)
            position = int(ranks.argmin())
            best, position = ranks[position], first + position
        if best == none:
            return None
        self._ends[position] = self._ends_array[position] = self.end + 1
        return position


class _Lines:
    """The offset lines: a chain of ``[start, end)`` pieces of time, each with its height.

    A line is known by its start. The heap has the height and start of every line, and of lines that are gone.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._height = [0] + [_GONE] * end
        self._end_of = [end] + [0] * end
        self._start_of = [0] * (end + 1)
        self._heap = [(0, 0)]

    def lowest(self) -> tuple[Offset, int, int]:
        """Return the height, start and end of the lowest line, the leftmost of equals."""
        height, start = self._heap[0]
        while self._height[start] != height:
            heapq.heappop(self._heap)
            height, start = self._heap[0]
        return height, start, self._end_of[start]

    def put(self, line: int, lower: int, upper: int, top: Offset) -> None:
        """Raise the part ``[lower, upper)`` of the lowest line to ``top``."""
        height, end = self._height[line], self._end_of[line]
        if line < lower:
            self._end_of[line], self._start_of[lower] = lower, line
            heapq.heappush(self._heap, (top, lower))
        else:
            heapq.heapreplace(self._heap, (top, lower))
        self._height[lower] = top
        self._end_of[lower], self._start_of[upper] = upper, lower
        if upper < end:
            self._height[upper] = height
            self._end_of[upper], self._start_of[end] = end, upper
            heapq.heappush(self._heap, (height, upper))

    def lift(self, line: int) -> None:
        """Raise the lowest line to its lowest neighbour and merge with every neighbour of that height."""
        start, end = line, self._end_of[line]
        left = self._height[self._start_of[start]] if start > 0 else _GONE
        right = self._height[end] if end < self._end else _GONE
        height = right if left == _GONE or _GONE < right < left else left
        if right == height:
            self._height[end] = _GONE
            end = self._end_of[end]
        if left == height:
            heapq.heappop(self._heap)
            self._height[line] = _GONE
            start = self._start_of[start]
        else:
            heapq.heapreplace(self._heap, (height, line))
            self._height[line] = height
        self._end_of[start], self._start_of[end] = end, start


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
