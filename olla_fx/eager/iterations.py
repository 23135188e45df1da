"""Finds the iteration in a stream of requests: the repeatability test.

SmartPool §V calls it done "once two consecutive subsequences are detected to be repeating". A stream has
noise at both ends (lazily made optimizer state, what is freed when the loop is over) and repetitions within
one iteration (equal layers), so the period is taken that explains the longest part of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from olla_fx.arena.events import AllocationEvent, EventKind
from olla_solvers.plan import Span

_RAREST = 8
"""The number of symbols whose distances are tried as periods: the rarest that occur again."""

_SMALLEST_SHARE = 0.4
"""A loop's iterations are most of what is recorded; equal layers of one step are not."""


@dataclass(frozen=True, slots=True)
class Period:
    """A part of a stream that repeats itself.

    Attributes:
        start: index of its first event.
        length: events of one repetition.
        repetitions: the number of its occurrences, at least 2; the last may be cut off.
    """

    start: int
    length: int
    repetitions: int


def find_period(events: Sequence[AllocationEvent]) -> Period | None:
    """Find the iteration of a loop.

    Args:
        events: requests and frees, in order.

    Returns:
        The period of the longest part that repeats; None if nothing does.
    """
    symbols = _symbols(events)
    best: tuple[int, int, int] | None = None
    for length in _candidates(symbols):
        start, run = _longest_run(symbols[:-length] == symbols[length:])
        covered = run + length
        if run >= length and (best is None or (covered, -length) > (best[0], -best[2])):
            best = covered, start, length
    if best is None or best[0] < _SMALLEST_SHARE * len(events):
        return None
    return Period(best[1], best[2], best[0] // best[2])


def _symbols(events: Sequence[AllocationEvent]) -> npt.NDArray[np.int64]:
    """Number the kinds of events: a request's size; a free's size and the age of its block."""
    requested: dict[int, int] = {}
    numbers: dict[tuple[bool, int, int], int] = {}
    symbols = np.empty(len(events), dtype=np.int64)
    for index, event in enumerate(events):
        is_free = event.kind is EventKind.FREE
        age = index - requested.get(event.block, index) if is_free else 0
        if not is_free:
            requested[event.block] = index
        symbols[index] = numbers.setdefault((is_free, event.size_bytes, age), len(numbers))
    return symbols


def _candidates(symbols: npt.NDArray[np.int64]) -> list[int]:
    """Return the distances between occurrences of rare symbols, up to half the stream."""
    counts = np.bincount(symbols) if len(symbols) else np.empty(0, dtype=np.int64)
    repeated = [int(symbol) for symbol in np.argsort(counts, kind="stable") if counts[symbol] > 1]
    distances: set[int] = set()
    for symbol in repeated[:_RAREST]:
        places = np.flatnonzero(symbols == symbol)
        # A symbol that occurs k times in an iteration repeats after k occurrences.
        for apart in range(1, min(len(places), 64)):
            distances.update(map(int, np.unique(places[apart:] - places[:-apart])))
    return sorted(distance for distance in distances if distance <= len(symbols) // 2)


def _longest_run(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the start and the length of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])


def spans_of_iteration(events: Sequence[AllocationEvent], period: Period) -> tuple[Span, ...]:
    """Return one iteration's blocks as rectangles.

    The iteration starts at its fewest live bytes. A block that lives on into the next iteration is alive all
    the time, because its successor is requested before it is freed.

    Args:
        events: the stream.
        period: from :func:`find_period`.
    """
    first = _quietest(events, period)
    last = first + period.length
    freed = {event.block: index for index, event in enumerate(events) if event.kind is EventKind.FREE}
    spans = []
    for index in range(first, last):
        event = events[index]
        if event.kind is EventKind.FREE or event.size_bytes == 0:
            continue
        end = freed.get(event.block, len(events))
        lower, upper = (index - first, end - first) if end < last else (0, period.length)
        spans.append(Span(str(event.block), lower, upper, event.size_bytes))
    return tuple(spans)


def _quietest(events: Sequence[AllocationEvent], period: Period) -> int:
    """Return the event of the last but one repetition at which the fewest of its own bytes are alive."""
    start = period.start + (period.repetitions - 2) * period.length
    alive, least, best = 0, None, start
    for index in range(start, start + period.length):
        if least is None or alive < least:
            least, best = alive, index
        event = events[index]
        alive += event.size_bytes if event.kind is EventKind.ALLOC else -event.size_bytes
    return best
