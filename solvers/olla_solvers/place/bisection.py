"""Aims the exact search at heights: at the goal first, then, if that is open, between it and what is known.

A search knows only one height: it places within that, or proves that nothing can. The goal is the bound, or
the user's capacity. A proof lifts the bound; a find lowers the placement; what stays open is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from olla_solvers.place.candidate import Found
from olla_solvers.place.search import SearchResult, SearchStatus, compilation_seconds, search
from olla_solvers.place.spans import unit_bytes
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes
from olla_solvers.progress import ProgressLog

FIRST_SHARE = 0.5
"""Of the time and the work, for the search at the goal."""

LATER_SHARE = 0.34
"""Of what is left, for each search above it."""

BRIEF_NODES = 6
"""Nodes that a brief search may try, for each array: three orders' first turns."""

LEAST_SECONDS = 0.05
LEAST_WORK = 1_000_000
"""Less is not worth a search."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What searching may cost.

    Attributes:
        deadline: on the monotonic clock.
        work: steps of the search; None for no limit. With a limit on work that is met before the deadline the
            result depends on the spans alone.
    """

    deadline: float
    work: int | None

    def seconds(self) -> float:
        """What is left until the deadline."""
        return self.deadline - time.monotonic()

    def part(self, share: float) -> Effort:
        """A share of what is left."""
        work = None if self.work is None else int(share * self.work)
        return Effort(time.monotonic() + share * self.seconds(), work)

    def less(self, work: int) -> Effort:
        """What is left after some steps of work."""
        return self if self.work is None else Effort(self.deadline, self.work - work)

    def is_worth(self) -> bool:
        """Whether enough is left for another search."""
        return self.seconds() > LEAST_SECONDS and (self.work is None or self.work > LEAST_WORK)


@dataclass(frozen=True, slots=True)
class Task:
    """What to place, and how low.

    Attributes:
        spans: checked rectangles.
        bound_bytes: most bytes alive at once.
        goal_bytes: the height that is low enough: the bound, or a capacity above it.
        is_capacity: whether heights above the goal are of no use.
        solver: ``auto``, ``none``, or the name of the integer program's solver.
        effort: what searching may cost.
        log: where improvements are noted.
    """

    spans: Sequence[Span]
    bound_bytes: Bytes
    goal_bytes: Bytes
    is_capacity: bool
    solver: str
    effort: Effort
    log: ProgressLog = field(default_factory=lambda: ProgressLog(time.monotonic()))


@dataclass(frozen=True, slots=True)
class Aimed:
    """What searching led to.

    Attributes:
        found: the lowest placement.
        bound_bytes: proven: no placement is lower.
        has_ended: nothing is left to gain: the goal is reached, or proven to be out of reach and what was
            found to be lowest.
    """

    found: Found
    bound_bytes: Bytes
    has_ended: bool


def when_compiled(effort: Effort) -> Effort:
    """An effort that begins once the search is compiled, so that this is at nobody's cost."""
    start = time.monotonic()
    compilation_seconds()
    return Effort(effort.deadline + time.monotonic() - start, effort.work)


def search_with(spans: Sequence[Span], height: Bytes, effort: Effort) -> SearchResult:
    """Search at one height, at the cost of a whole effort at most."""
    return search(spans, height, time_limit=max(0.0, effort.seconds()), work_limit=effort.work)


def search_briefly(task: Task, known: Found, effort: Effort) -> tuple[Found, int]:
    """Search at the goal for a few turns only, which is enough for most instances.

    Args:
        task: what to place.
        known: where the spans can lie.
        effort: what it may cost.

    Returns:
        The lower placement, and the work.
    """
    goal = max(task.goal_bytes, task.bound_bytes)
    limit = BRIEF_NODES * len(task.spans)
    seconds = max(0.0, effort.seconds())
    result = search(task.spans, goal, time_limit=seconds, node_limit=limit, work_limit=effort.work)
    if result.offsets is None:
        return known, result.work
    return Found.of(task.spans, result.offsets, f"search:{result.order}"), result.work


def close_gap(task: Task, known: Found, effort: Effort) -> Aimed:
    """Lower a placement towards a goal, or prove that it cannot be.

    Args:
        task: what to place.
        known: where the spans can lie.
        effort: what it may cost.

    Returns:
        The best placement and bound.
    """
    spans, bound, goal = task.spans, task.bound_bytes, task.goal_bytes
    unit = unit_bytes([span for span in spans if span.size_bytes > 0])
    height, tried = goal, bound
    share = 1.0 if task.is_capacity else FIRST_SHARE
    while known.height_bytes > max(goal, bound) and not (task.is_capacity and bound > goal):
        result = search_with(spans, height, effort.part(share))
        effort, share = effort.less(result.work), LATER_SHARE
        if result.status is SearchStatus.FOUND and result.offsets is not None:
            known = Found.of(spans, result.offsets, f"search:{result.order}")
        else:
            tried = (height // unit + 1) * unit
            if result.status is SearchStatus.INFEASIBLE:
                bound = max(bound, tried)
        task.log.note(known.height_bytes, min(bound, known.height_bytes), "search")
        if tried >= known.height_bytes or not effort.is_worth():
            break
        height = max(tried, (tried + known.height_bytes - unit) // 2 // unit * unit)
    has_ended = known.height_bytes <= max(goal, bound) or (task.is_capacity and bound > goal)
    return Aimed(known, bound, has_ended)
