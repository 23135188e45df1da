"""The default method: heuristics, then the exact search, then the integer program, until a proof.

Each stage begins only while the height is above what is proven: skylines first, which need nothing compiled
and reach the bound on most training steps; the exact search aimed at the bound, briefly; the crowded times by
themselves; the search for as long as it pays; other crowded times; the integer program where it is small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from olla_solvers.ilp.place_spans import may_help, solve_with, solve_with_any
from olla_solvers.place.bisection import Aimed, Effort, Task, close_gap, search_briefly, when_compiled
from olla_solvers.place.candidate import Found
from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.place.high_pressure import FIRST_CROWDED, has_quiet_times, improve_by_crowds, is_very_large
from olla_solvers.place.search import INSTALL, is_available
from olla_solvers.plan import SolverReport
from olla_solvers.problem import Bytes

FIRST_PASSES = 4
"""Heuristic passes before the search, which is faster than the others where they would be needed."""

BRIEF_SHARE = 0.15
"""Of the effort, for a brief search and its crowded times, before the search of the whole."""

SEARCH_SHARE = 0.8
"""Of the effort, for the search of the whole; the rest is for its crowded times."""


@dataclass(frozen=True, slots=True)
class Result:
    """A placement, what is proven, and by what.

    Attributes:
        found: the lowest placement.
        bound_bytes: no placement is lower.
        proved_by: what proved that, if it meets the height.
        report: of the integer program.
    """

    found: Found
    bound_bytes: Bytes
    proved_by: str | None
    report: SolverReport


def place_auto(task: Task) -> Result:
    """Place spans by all means, in turn.

    Args:
        task: what to place; a named solver's integer program runs before the search.

    Returns:
        The best placement.

    Raises:
        SolverUnavailableError: when the named solver's licence does not take the program.
    """
    spans, bound, goal, effort = task.spans, task.bound_bytes, task.goal_bytes, task.effort
    named = task.solver not in ("auto", "none")
    found = best_of_heuristics(spans, goal, last=_passes(task, named), log=task.log)
    result = Result(found, bound, "live bytes" if found.height_bytes == bound else None, SolverReport("none"))
    if named:
        # The named solver is a referee: it gets no better start than the heuristics, and half of the time.
        result = _with_program(task, result, effort.part(0.5) if found.height_bytes > goal else effort)
    if result.found.height_bytes > max(goal, result.bound_bytes):
        result = _with_search(task, result)
    is_open = result.found.height_bytes > max(goal, result.bound_bytes)
    if task.solver == "auto" and is_open and may_help(spans):
        result = _with_program(task, result, effort)
    return result


def _passes(task: Task, named: bool) -> int:
    """How many heuristic passes come first: all where no search follows, one where each takes seconds."""
    if named or not is_available():
        return 99
    return 1 if is_very_large(task.spans) else FIRST_PASSES


def _with_search(task: Task, result: Result) -> Result:
    """Lower a placement by searching; without numba, say what is missing."""
    if not is_available():
        note = f"{result.found.method} (no exact search: numba is missing, {INSTALL})"
        return replace(result, found=replace(result.found, method=note))
    spans, goal, effort = task.spans, task.goal_bytes, when_compiled(task.effort)
    task = replace(task, bound_bytes=result.bound_bytes)
    aimed = Aimed(result.found, result.bound_bytes, False)
    very_large = is_very_large(spans)
    if not very_large:
        found = result.found
        if has_quiet_times(task):
            found, work = _search_briefly(task, found, effort.part(BRIEF_SHARE))
            effort = effort.less(work)
        aimed = close_gap(task, found, effort.part(SEARCH_SHARE))
        effort = Effort(
            effort.deadline, None if effort.work is None else int((1 - SEARCH_SHARE) * effort.work)
        )
    if not aimed.has_ended:
        better = aimed.found
        if not very_large:
            better = best_of_heuristics(spans, goal, best=better, first=FIRST_PASSES, log=task.log)
        better, _ = improve_by_crowds(replace(task, bound_bytes=aimed.bound_bytes), better, effort)
        aimed = replace(aimed, found=better)
    proved_by = result.proved_by
    if aimed.found.height_bytes == aimed.bound_bytes:
        proved_by = "live bytes" if aimed.bound_bytes == result.bound_bytes else "search"
    return replace(result, found=aimed.found, bound_bytes=aimed.bound_bytes, proved_by=proved_by)


def _search_briefly(task: Task, known: Found, effort: Effort) -> tuple[Found, int]:
    """Try what settles most instances soon: few turns of the search, then the crowded times."""
    found, work = search_briefly(task, known, effort)
    task.log.note(found.height_bytes, task.bound_bytes, found.method)
    found, more = improve_by_crowds(task, found, effort.less(work), FIRST_CROWDED)
    return found, work + more


def _with_program(task: Task, result: Result, effort: Effort) -> Result:
    """Let the integer program lower or prove a placement."""
    spans, known, bound = task.spans, result.found, result.bound_bytes
    if task.solver == "auto":
        found, report = solve_with_any(spans, known, bound, effort.deadline)
    else:
        found, report = solve_with(spans, known, bound, task.solver, effort.deadline)
    proven = max(bound, report.bound_bytes or 0)
    task.log.note(found.height_bytes, min(proven, found.height_bytes), found.method)
    proved_by = result.proved_by
    if found.height_bytes == proven and proved_by is None:
        proved_by = "live bytes" if proven == task.bound_bytes else f"mip:{report.solver}"
    return Result(found, proven, proved_by, report)
