"""Very large instances: takes out what lies too high and searches room for it in windows of time.

A search visits every array of a component at every node, which is too much for a hundred thousand. But what
lies above the goal is little, and far from it in time nothing needs to move. So, with a target height:
arrays that end above it are taken out, and each is put back by a search of its own. That search may move a
few hundred arrays that live within a window of time around it; all that cross the window's borders, of which
few are chosen by cutting where few live, keep their offsets as given ones do. What cannot be put back in any
window raises the target. Where a window holds more arrays than a search takes, the smallest stay where they
are: the large ones are searched, and the small ones fill the holes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.place.aim import Effort, Task
from olla_solvers.place.found import Found
from olla_solvers.place.search import SearchStatus, search
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset, Timestep

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

MOST_STEPS = 400_000_000
"""Arrays times arrays, summed over components, from which on an instance is very large."""

WINDOW_SIZES = (40, 120, 360)
"""How many arrays a window's search may move, in turn."""

NODES_FOR_EACH = 30
"""Nodes that a window's search may try, for each array that it may move."""

TARGET_STEP = 0.25
"""How far a target rises towards the known height when something cannot be put back."""


def is_very_large(spans: Sequence[Span]) -> bool:
    """Whether one search over all of them would take minutes even without a wrong turn."""
    steps = 0
    alive_until: Timestep | None = None
    count = 0
    for lower, upper in sorted((span.lower, span.upper) for span in spans):
        if alive_until is not None and lower >= alive_until:
            steps, count = steps + count * count, 0
        alive_until = upper if alive_until is None else max(alive_until, upper)
        count += 1
    return steps + count * count > MOST_STEPS


def improve_in_windows(task: Task, known: Found, effort: Effort) -> Found:
    """Lower a placement towards a goal by moving a few arrays at a time.

    Args:
        task: what to place.
        known: where it lies.
        effort: what it may cost.

    Returns:
        A placement that is at least as low.
    """
    target = max(task.goal_bytes, task.bound_bytes)
    if known.height_bytes <= target:
        return known
    board = _Board(task.spans, known.offsets)
    waiting = board.take_out_above(target)
    while target < known.height_bytes:
        waiting, effort = _put_back(board, waiting, target, effort)
        if not waiting:
            return Found.of(task.spans, board.offsets(), "windows")
        if task.is_capacity or not effort.is_worth():
            break
        target += max(1, int(TARGET_STEP * (known.height_bytes - target)))
    return known


def _put_back(board: _Board, waiting: list[int], target: Bytes, effort: Effort) -> tuple[list[int], Effort]:
    """Put arrays back below a target, as many as can be; those that cannot, and the effort that is left."""
    left: list[int] = []
    for position, index in enumerate(waiting):
        if not effort.is_worth():
            return left + waiting[position:], effort
        if board.drop_in(index, target):
            continue
        for count in WINDOW_SIZES:
            done, work = board.search_window(index, count, target, effort)
            effort = effort.less(work)
            if done or not effort.is_worth():
                break
        if not board.is_placed[index]:
            left.append(index)
    return left, effort


class _Board:
    """Where everything lies; arrays are indices."""

    def __init__(self, spans: Sequence[Span], offsets: Sequence[Offset]) -> None:
        self._spans = spans
        self._lower = np.array([span.lower for span in spans], dtype=np.int64)
        self._upper = np.array([span.upper for span in spans], dtype=np.int64)
        self._size = np.array([span.size_bytes for span in spans], dtype=np.int64)
        self._given = np.array([span.offset is not None for span in spans], dtype=bool)
        self._offset = np.array(offsets, dtype=np.int64)
        self.is_placed: Flags = self._size > 0

    def offsets(self) -> tuple[Offset, ...]:
        """An offset for each span."""
        return tuple(int(offset) for offset in self._offset)

    def take_out_above(self, target: Bytes) -> list[int]:
        """Take out what ends above a height; the largest areas first."""
        high = np.flatnonzero((self._offset + self._size > target) & ~self._given & self.is_placed)
        self.is_placed[high] = False
        area = (self._upper[high] - self._lower[high]) * self._size[high]
        return [int(index) for index in high[np.argsort(-area, kind="stable")]]

    def drop_in(self, index: int, target: Bytes) -> bool:
        """Put one array into the lowest hole below a height, if there is one."""
        span = self._spans[index]
        others = self._alive(span.lower, span.upper)
        offset = 0
        for other in others[np.argsort(self._offset[others], kind="stable")]:
            if int(self._offset[other]) >= offset + span.size_bytes:
                break
            top = int(self._offset[other] + self._size[other])
            offset = max(offset, -(-top // span.alignment) * span.alignment)
        if offset + span.size_bytes > target:
            return False
        self._offset[index] = offset
        self.is_placed[index] = True
        return True

    def search_window(self, index: int, count: int, target: Bytes, effort: Effort) -> tuple[bool, int]:
        """Put one array below a height, moving up to ``count`` others; whether it worked, and the work."""
        start, end, free = self._window(index, count)
        around = self._alive(start, end)
        around = around[~np.isin(around, free)]
        moved = [*free.tolist(), index]
        spans = [self._spans[each] for each in moved] + list(self._walls(around, start, end))
        result = search(
            spans,
            target,
            time_limit=max(0.0, effort.seconds()),
            node_limit=NODES_FOR_EACH * len(moved),
        )
        if result.status is not SearchStatus.FOUND or result.offsets is None:
            return False, result.work
        self._offset[moved] = result.offsets[: len(moved)]
        self.is_placed[index] = True
        return True, result.work

    def _alive(self, start: Timestep, end: Timestep) -> Ints:
        """What is placed and lives within a time, in part at least."""
        return np.flatnonzero(self.is_placed & (self._lower < end) & (self._upper > start))

    def _window(self, index: int, count: int) -> tuple[Timestep, Timestep, Ints]:
        """A time around an array, and up to ``count`` others that live in it alone, the largest."""
        start, end = int(self._lower[index]), int(self._upper[index])
        movable = self.is_placed & ~self._given
        while True:
            inside = np.flatnonzero(movable & (self._lower >= start) & (self._upper <= end))
            if len(inside) >= count:
                largest = inside[np.argsort(-self._size[inside], kind="stable")[:count]]
                return start, end, largest
            if start <= int(self._lower.min()) and end >= int(self._upper.max()):
                return start, end, inside
            margin = max(1, (end - start) // 2)
            start, end = start - margin, end + margin

    def _walls(self, around: Ints, start: Timestep, end: Timestep) -> Iterator[Span]:
        """What keeps its offset, cut to a window."""
        for number in around.tolist():
            span = self._spans[number]
            yield Span(
                span.name,
                max(start, span.lower),
                min(end, span.upper),
                span.size_bytes,
                1,
                int(self._offset[number]),
            )
