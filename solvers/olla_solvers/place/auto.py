"""The default method: heuristics, then the exact search, then the integer program, until a proof.

Each stage begins only while the height is above what is proven. The skylines come first, which need nothing
compiled and reach the bound on most training steps; then the high-pressure intervals by themselves, the exact
search for as long as it pays, and the integer program, if it is small.
"""

from __future__ import annotations

from dataclasses import replace

from olla_solvers.ilp.place_spans import may_help, solve_with, solve_with_any
from olla_solvers.place.bisection import bisect, when_compiled
from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.place.high_pressure import has_quiet_times, is_very_large, place_high_pressure
from olla_solvers.place.search import INSTALL, is_available
from olla_solvers.place.task import Candidate, Effort, Result, Task
from olla_solvers.plan import SolverEffect

FIRST_SHARE = 0.15
"""Of the effort, for the high-pressure intervals, before the search of the whole."""


def place_auto(task: Task) -> Result:
    """Place spans by all means, in turn.

    Args:
        task: the spans and the goal; a named solver's integer program runs before the search.

    Returns:
        The best placement.

    Raises:
        SolverUnavailableError: if the named solver's licence does not take the program.
    """
    named = task.solver not in ("auto", "none")
    # On a very large instance each heuristic takes seconds.
    passes = 1 if not named and is_available() and is_very_large(task.spans) else 9
    candidate = best_of_heuristics(task.spans, task.goal_bytes, passes=passes, log=task.log)
    result = Result(candidate, task.bound_bytes)
    if named:
        # The named solver is a referee: it gets no better start than the heuristics, and half of the time.
        result = run_program(task, result, task.effort if result.is_settled(task) else task.effort.part(0.5))
    if not result.is_settled(task):
        result = _search(task, result)
    if task.solver == "auto" and not result.is_settled(task) and may_help(task.spans):
        result = run_program(task, result, task.effort)
    return result


def run_program(task: Task, result: Result, effort: Effort) -> Result:
    """Lower or prove a placement by the integer program.

    Args:
        task: the spans and the solver; ``auto`` for the first solver that takes the program.
        result: a placement, and the bound so far.
        effort: of which the deadline matters here.

    Returns:
        The best placement and bound.

    Raises:
        SolverUnavailableError: if the named solver's licence does not take the program.
    """
    known, bound = result.candidate, result.bound_bytes
    if task.solver == "auto":
        offsets, report = solve_with_any(task.spans, known.offsets, bound, effort.deadline)
    else:
        offsets, report = solve_with(task.spans, known.offsets, bound, task.solver, effort.deadline)
    if report.effect is SolverEffect.IMPROVED:
        known = Candidate.of(task.spans, offsets, f"mip:{report.solver}")
    bound_by = result.bound_by
    if report.bound_bytes is not None and report.bound_bytes > bound:
        bound, bound_by = report.bound_bytes, f"mip:{report.solver}"
    task.log.note(known.height_bytes, min(bound, known.height_bytes), known.method)
    return Result(known, bound, bound_by, report)


def _search(task: Task, result: Result) -> Result:
    """Lower a placement by searching; without numba, say what is missing."""
    if not is_available():
        known = result.candidate
        note = f"{known.method} (no exact search: numba is missing, {INSTALL})"
        return replace(result, candidate=replace(known, method=note))
    effort = when_compiled(task.effort)
    task = replace(task, bound_bytes=result.bound_bytes)
    if is_very_large(task.spans):
        return replace(result, candidate=place_high_pressure(task, result.candidate, effort)[0])
    if has_quiet_times(task):
        candidate, work = place_high_pressure(task, result.candidate, effort.part(FIRST_SHARE))
        result, effort = replace(result, candidate=candidate), effort.less(work)
    return bisect(task, result, effort)
