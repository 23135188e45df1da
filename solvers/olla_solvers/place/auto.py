"""The default method: heuristics, then the exact search, then the integer program, until a proof.

Each stage begins only while the height is above what is proven. The skylines come first, which need nothing
compiled and reach the bound on most training steps; then the high-pressure intervals by themselves, the exact
search for as long as it pays, and the integer program, if it is small.

:func:`place_auto` runs all of it where it is called. :func:`place_patiently` keeps the compiled search, which
takes a hundred megabytes and once on a machine half a minute to compile, in a process of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from olla_solvers.effort import apart
from olla_solvers.effort.patience import DEFAULT_SECONDS, Patience
from olla_solvers.effort.progress import Observer
from olla_solvers.ilp.place_spans import may_help, solve_with, solve_with_any
from olla_solvers.place.bisection import bisect, when_compiled
from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.place.high_pressure import has_quiet_times, is_very_large, place_high_pressure
from olla_solvers.place.search import INSTALL, compilation_seconds, is_available, is_compiled
from olla_solvers.place.task import FIRST_WORK, Candidate, Effort, Result, Task
from olla_solvers.plan import Placement, SolverEffect, Span

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
    result = _before_search(task)
    if not result.is_settled(task):
        result = _search(task, result, when_compiled)
    return _after_search(task, result)


def place_patiently(
    spans: Sequence[Span], patience: Patience, *, solver: str = "auto", observer: Observer | None = None
) -> Placement:
    """Place for as long as patience lasts; arguments, result and errors as for ``place``.

    An observer hears of each lower placement while placing goes on.
    """
    task = Task.checked(spans, solver=solver, patience=patience, observer=observer)
    result = _before_search(task)
    if not result.is_settled(task):
        if not is_available():
            result = _search(task, result, when_compiled)
        elif task.effort.seconds() >= apart.LEAST_SECONDS:

            def note(better: Result) -> None:
                height = better.candidate.height_bytes
                task.log.note(height, min(better.bound_bytes, height), better.candidate.method)

            on_answer = None if observer is None else note
            result = apart.last_answer(go_on, (task, result), task.effort.seconds(), on_answer) or result
            note(result)
    return _after_search(task, result).placement(task)


def go_on(task: Task, result: Result, offer: apart.Offer) -> None:
    """Lower a placement by searching; what a process of its own runs.

    Compiling the search counts here, as the caller waits for it, and without a time limit of the user's gets
    no more than the default. What has been compiled until then is kept, so the next time there is less to do.

    Args:
        task: the spans and the goal.
        result: a placement, and the bound so far.
        offer: takes each better result.
    """
    if not is_compiled():
        if not result.is_worth_more(task):
            return
        if not task.patience.insists:
            # Compiling cannot be interrupted but by ending this process.
            late = threading.Timer(DEFAULT_SECONDS, os._exit, (0,))
            late.daemon = True
            late.start()
            compilation_seconds()
            late.cancel()
    _search(replace(task, offer=offer), result, lambda effort: when_compiled(effort, counts=True))


def _before_search(task: Task) -> Result:
    """Run the heuristics, and a named solver's program."""
    named = task.solver not in ("auto", "none")
    # On a very large instance each heuristic takes seconds.
    passes = 1 if not named and is_available() and is_very_large(task.spans) else 9
    candidate = best_of_heuristics(task.spans, task.goal_bytes, passes=passes, log=task.log)
    result = Result(candidate, task.bound_bytes)
    if named:
        # The named solver is a referee: it gets no better start than the heuristics, and half of the time.
        result = run_program(task, result, task.effort if result.is_settled(task) else task.effort.part(0.5))
    return result


def _after_search(task: Task, result: Result) -> Result:
    """Run the integer program if nobody asked for it, but it is small enough to help."""
    if task.solver == "auto" and not result.is_settled(task) and may_help(task.spans):
        return run_program(task, result, task.effort)
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


def _search(task: Task, result: Result, compiled: Callable[[Effort], Effort]) -> Result:
    """Lower a placement by searching; without numba, say what is missing."""
    if not is_available():
        known = result.candidate
        note = f"{known.method} (no exact search: numba is missing, {INSTALL})"
        return replace(result, candidate=replace(known, method=note))
    effort = compiled(task.effort)
    task = replace(task, bound_bytes=result.bound_bytes)
    if not result.is_worth_more(task):
        effort = effort.at_most(FIRST_WORK)
    if is_very_large(task.spans):
        result = replace(result, candidate=place_high_pressure(task, result.candidate, effort)[0])
        task.offer(result)
        return result
    if has_quiet_times(task):
        candidate, work = place_high_pressure(task, result.candidate, effort.part(FIRST_SHARE))
        result, effort = replace(result, candidate=candidate), effort.less(work)
        task.offer(result)
        if not result.is_worth_more(task):
            effort = effort.at_most(FIRST_WORK)
    return bisect(task, result, effort)
