"""Places the high-pressure intervals first, exactly; then the other spans around them.

A search visits every array of a component at every node, which is too much for a hundred thousand, and takes
a thousand for as hard as the hardest three hundred of them. But room is scarce only in the high-pressure
intervals, at which the live bytes come near the bound. Arrays that never live there are left out; the others
fall apart at the timesteps where few live, and each part is searched by itself at the goal. If a part is too
large or its search does not finish, its large arrays are searched and the small ones fill the holes. Then the
other spans go greedily around these, those of the fuller times first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from olla_solvers.place.greedy import OutOfTimeError, by_size, greedy
from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.place.search import search
from olla_solvers.place.task import Candidate, Effort, Task
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset
from olla_solvers.spans import height_bytes

MOST_STEPS = 400_000_000
"""Arrays times arrays, summed over components, from which on an instance is very large."""

SHARE = 0.9
"""Share of the bound from which on an interval is of high pressure."""

MOST_UNDER_PRESSURE = 0.7
"""If more of all arrays live in high-pressure intervals, these are as hard as all."""

RANDOM_ORDERS = 8
"""In a round of the search of a part: fresh starts serve small parts better than long runs."""

LEVELS = 50
"""Steps by which times are told apart by their live bytes when the rest is placed."""

MOST_SEARCHED = 3000
"""Larger parts are searched for their large arrays only."""

LARGE_ARRAYS = 600
"""Number of arrays of a part that count as large."""

NODES_FOR_EACH = 60
"""Nodes that the search of a part may try, for each of its arrays."""

FILLING_SECONDS = 15.0
"""Time after the deadline in which what has begun may be finished."""


def is_very_large(spans: Sequence[Span]) -> bool:
    """Return True if one search over all spans would take minutes even without a wrong turn."""
    return sum(len(part) ** 2 for part in components(spans, range(len(spans)))) > MOST_STEPS


def has_quiet_times(task: Task) -> bool:
    """Return True if so many arrays live only at quiet times that the others are worth a try alone."""
    under_pressure = sum(load >= SHARE * task.bound_bytes for load in load_bytes(task.spans))
    return under_pressure <= MOST_UNDER_PRESSURE * len(task.spans)


def place_high_pressure(task: Task, known: Candidate, effort: Effort) -> tuple[Candidate, int]:
    """Lower a placement by placing the high-pressure intervals first.

    Args:
        task: the spans and the goal.
        known: a placement of the spans.
        effort: cost that the searches may have; what has begun is finished if that takes no longer than
            :data:`FILLING_SECONDS` more.

    Returns:
        A placement that is at least as low, and the work.
    """
    if not effort.is_worth():
        return known, 0
    loads = load_bytes(task.spans)
    # Given spans are walls wherever they live.
    under_pressure = [
        index
        for index, (span, load) in enumerate(zip(task.spans, loads, strict=True))
        if load >= SHARE * task.bound_bytes or span.offset is not None
    ]
    placed, work = _place_parts(task.spans, under_pressure, max(task.goal_bytes, task.bound_bytes), effort)
    level = {
        span.name: load * LEVELS // max(1, task.bound_bytes) for span, load in zip(placed, loads, strict=True)
    }
    try:
        offsets = greedy(
            placed,
            lambda span: (-level[span.name], span.lower - span.upper),
            best_fit=True,
            deadline=effort.deadline + FILLING_SECONDS,
        )
    except OutOfTimeError:
        return known, work
    known = known.or_lower(Candidate.of(task.spans, offsets, "high-pressure intervals first"))
    task.log.note(known.height_bytes, task.bound_bytes, known.method)
    return known, work


def load_bytes(spans: Sequence[Span]) -> list[Bytes]:
    """Return for each span the most bytes alive at a timestep of its lifetime."""
    lower = np.array([span.lower for span in spans], dtype=np.int64)
    upper = np.array([span.upper for span in spans], dtype=np.int64)
    size = np.array([span.size_bytes for span in spans], dtype=np.int64)
    times = np.unique(np.concatenate([lower, upper]))
    first, last = np.searchsorted(times, lower), np.searchsorted(times, upper)
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last, size)
    table, length = np.cumsum(change), last - first
    most = np.zeros(len(spans), dtype=np.int64)
    width = 1
    while len(table):
        # The table holds maxima over ``width`` times; two of them cover any length from width to twice that.
        fit = (length >= width) & (length < 2 * width)
        most[fit] = np.maximum(table[first[fit]], table[last[fit] - width])
        table = np.maximum(table[:-width], table[width:])
        width *= 2
    return [int(load) for load in most]


def components(spans: Sequence[Span], indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of spans that no timestep without any of them separates."""
    part: list[int] = []
    end = 0
    for index in sorted(indices, key=lambda i: spans[i].lower):
        if part and spans[index].lower >= end:
            yield part
            part = []
        end = max(end, spans[index].upper) if part else spans[index].upper
        part.append(index)
    if part:
        yield part


def _place_parts(
    spans: Sequence[Span], indices: Sequence[int], goal: Bytes, effort: Effort
) -> tuple[list[Span], int]:
    """Give some spans their offsets, part by part; return all spans, and the work."""
    placed, work = list(spans), 0
    for part in components(spans, indices):
        offsets, spent = _place_part([spans[index] for index in part], goal, effort.less(work))
        work += spent
        for index, offset in zip(part, offsets, strict=True):
            placed[index] = replace(spans[index], offset=offset)
    return placed, work


def _place_part(spans: Sequence[Span], goal: Bytes, effort: Effort) -> tuple[Sequence[Offset], int]:
    """Place a part within the goal if it can be done; return its offsets, and the work."""
    known = best_of_heuristics(spans, goal)
    if known.height_bytes <= goal or not effort.is_worth():
        return known.offsets, 0
    work = 0
    if len(spans) <= MOST_SEARCHED:
        offsets, work = _search(spans, goal, effort)
        if offsets is not None:
            return offsets, work
    if len(spans) <= LARGE_ARRAYS:
        return known.offsets, work
    filled, spent = _large_then_small(spans, goal, effort.less(work))
    if filled is not None and height_bytes(spans, filled) < known.height_bytes:
        return filled, work + spent
    return known.offsets, work + spent


def _search(spans: Sequence[Span], goal: Bytes, effort: Effort) -> tuple[Sequence[Offset] | None, int]:
    """Search a part at the goal; return its offsets, if there are any, and the work."""
    limit = NODES_FOR_EACH * len(spans)
    result = search(spans, goal, time_limit=effort.seconds(), node_limit=limit, random_orders=RANDOM_ORDERS)
    return result.offsets, result.work


def _large_then_small(
    spans: Sequence[Span], goal: Bytes, effort: Effort
) -> tuple[Sequence[Offset] | None, int]:
    """Search the large arrays, then fill with the small, the largest first."""
    large = sorted(range(len(spans)), key=lambda i: -spans[i].size_bytes)[:LARGE_ARRAYS]
    offsets, work = _search([spans[index] for index in large], goal, effort)
    if offsets is None:
        return None, work
    placed = list(spans)
    for index, offset in zip(large, offsets, strict=True):
        placed[index] = replace(spans[index], offset=offset)
    try:
        return greedy(placed, by_size, deadline=effort.deadline + FILLING_SECONDS), work
    except OutOfTimeError:
        return None, work
