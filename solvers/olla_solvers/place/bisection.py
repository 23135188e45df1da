"""Bisects heights by the exact search: the goal first, then, if that stays open, heights above it.

A search knows only one height: it places within that, or proves that nothing can. The goal is the bound, or
the user's capacity. A proof raises the bound; a placement lowers the candidate; a height that stays open is
left behind, and the next one lies halfway between it and the candidate.
"""

from __future__ import annotations

import time
from dataclasses import replace

from olla_solvers.place.search import SearchStatus, compilation_seconds, search
from olla_solvers.place.task import Candidate, Effort, Result, Task
from olla_solvers.spans import unit_bytes

FIRST_SHARE = 0.5
"""Of the time and the work, for the search at the goal."""

LATER_SHARE = 0.34
"""Of what is left, for each search above it."""


def when_compiled(effort: Effort, *, counts: bool = False) -> Effort:
    """Make the search ready.

    Args:
        effort: cost that searches may have.
        counts: False if compiling counts towards no limit.

    Returns:
        The effort that is left: of which nothing is gone unless compiling counts.
    """
    start = time.monotonic()
    compilation_seconds()
    return effort if counts else Effort(effort.deadline + time.monotonic() - start, effort.work)


def bisect(task: Task, result: Result, effort: Effort) -> Result:
    """Lower a placement towards the goal, or prove that it cannot be lowered.

    Args:
        task: the spans and the goal.
        result: a placement of the spans, and the bound so far.
        effort: cost that the searches may have.

    Returns:
        The best placement and bound.
    """
    unit = unit_bytes([span for span in task.spans if span.size_bytes > 0])
    height, tried = task.goal_bytes, result.bound_bytes
    share = 1.0 if task.is_capacity else FIRST_SHARE
    while not result.is_settled(task):
        part = effort.part(share)
        answer = search(task.spans, height, time_limit=part.seconds(), work_limit=part.work)
        effort, share = effort.less(answer.work), LATER_SHARE
        if answer.offsets is not None:
            candidate = Candidate.of(task.spans, answer.offsets, f"search:{answer.order}")
            result = replace(result, candidate=candidate)
        else:
            tried = (height // unit + 1) * unit
            if answer.status is SearchStatus.INFEASIBLE and tried > result.bound_bytes:
                result = replace(result, bound_bytes=tried, bound_by="search")
        known = result.candidate.height_bytes
        task.log.note(known, min(result.bound_bytes, known), "search")
        task.offer(result)
        if tried >= known or not effort.is_worth() or not result.is_worth_more(task):
            break
        height = max(tried, (tried + known - unit) // 2 // unit * unit)
    return result
