"""Places spans by any method, by its name, and within a capacity.

The default, :func:`olla_solvers.place.place`, needs neither; this is the front door for the command line,
benchmarks and papers' tables. Methods:

auto                the default: all that helps, in turn
skyline             best fit on a skyline, longest lifetime first (profile-guided allocation, §3.2)
skylines            that under several tie-breaks with time running either way, stopping at the bound
size-first-fit      the largest array first, into the lowest hole (SmartPool §III-C)
size-best-fit       the largest array first, into the smallest hole (SmartPool §III-C)
pyramid             preplacement (OLLA, Function 5), greedy best fit for the rest
pyramid-mip         preplacement, the integer program for the rest (OLLA §4.5)
mip                 the integer program (OLLA equation 15, profile-guided allocation (1)-(6))
search              the exact search of ``place/search`` alone
birth-first-fit     arrays in the sequence of allocation, into the lowest hole
caching-allocator   the rules of the CUDA caching allocator
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from olla_solvers.baselines.caching_allocator import replay
from olla_solvers.baselines.smartpool import birth_first_fit, size_best_fit, size_first_fit
from olla_solvers.effort.patience import Patience
from olla_solvers.effort.progress import Observer, ProgressLog
from olla_solvers.errors import NoSolutionError, ProblemError, SolverUnavailableError
from olla_solvers.ilp import backends
from olla_solvers.infeasible.irreducible import refuse_impossible, refuse_proven
from olla_solvers.paper.pyramid import pyramid
from olla_solvers.place.auto import place_auto, run_program
from olla_solvers.place.bisection import bisect, when_compiled
from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.place.search import compilation_so_far
from olla_solvers.place.skyline import longest_lifetime, skyline
from olla_solvers.place.task import Candidate, Result, Task
from olla_solvers.plan import Placement, Span
from olla_solvers.problem import Bytes, Offset

Method = Callable[[Task], Result]

DEFAULT_SECONDS = 30.0
"""Time limit if none is given."""

DEFAULT_WORK = 600_000_000
"""Steps of the search if no time limit is given, about ten seconds."""


def place_with(
    spans: Sequence[Span],
    *,
    method: str = "auto",
    capacity_bytes: Bytes | None = None,
    solver: str = "auto",
    time_limit: float | None = None,
    observer: Observer | None = None,
) -> Placement:
    """Place spans by a named method, as low as it does or within a capacity.

    Args:
        spans: rectangles; those with an offset keep it, and every offset is a multiple of its alignment.
        method: a name in :data:`METHODS`.
        capacity_bytes: a height that is low enough; None to go as low as possible.
        solver: as for :func:`olla_solvers.place.place`.
        time_limit: seconds for everything beyond the heuristics; None for at most about 30. Compiling the
            search, which happens here and once on a machine, is not counted.
        observer: hears of lower placements by heuristics and programs while placing goes on.

    Returns:
        Offsets, their height and the bound on it.

    Raises:
        ProblemError: as for :func:`olla_solvers.place.place`, and on an unknown method.
        OptionError: if the time limit is not a number of seconds.
        InfeasibleError: if two given offsets collide, or a capacity is proven to be too small; names the
            spans that cannot fit together.
        NoSolutionError: if nothing within the capacity was found in the time, nor proven impossible.
        SolverUnavailableError: if the named solver is unknown, missing or not licensed.
    """
    if method not in METHODS:
        raise ProblemError(f"unknown method {method!r} of placement; one of {', '.join(METHODS)}")
    backends.check_options(solver, time_limit)
    patience = Patience.until(time.monotonic() + (DEFAULT_SECONDS if time_limit is None else time_limit))
    task = Task.checked(
        spans, solver=solver, patience=patience, capacity_bytes=capacity_bytes, observer=observer
    )
    if time_limit is None:
        task = replace(task, effort=replace(task.effort, work=DEFAULT_WORK))
    if capacity_bytes is not None:
        refuse_impossible(spans, capacity_bytes, task.effort)
    compiled = compilation_so_far()
    result = METHODS[method](task)
    height = result.candidate.height_bytes
    if capacity_bytes is not None and height > capacity_bytes:
        if result.bound_bytes > capacity_bytes:
            deadline = task.effort.deadline + compilation_so_far() - compiled  # compiling counts nowhere
            refuse_proven(spans, capacity_bytes, replace(task.effort, deadline=deadline))
        raise NoSolutionError(
            f"nothing within the capacity of {capacity_bytes} B was found in "
            f"{time.monotonic() - task.start:.1f} s, nor ruled out; the lowest placement found needs "
            f"{height} B"
        )
    return result.placement(task)


def _simple(name: str, offsets_of: Callable[[Sequence[Span]], Sequence[Offset]]) -> Method:
    """Return a method that computes one placement and proves nothing."""
    return lambda task: Result(Candidate.of(task.spans, offsets_of(task.spans), name), task.bound_bytes)


def _paper_skyline(spans: Sequence[Span]) -> tuple[Offset, ...]:
    """Place spans by the paper's rule."""
    return skyline(spans, longest_lifetime)


def _skylines(task: Task) -> Result:
    """Take the best of all fast heuristics."""
    return Result(best_of_heuristics(task.spans, task.goal_bytes, log=task.log), task.bound_bytes)


def _search(task: Task) -> Result:
    """Bisect from the placement of an allocator without a plan."""
    known = _simple("birth-first-fit", birth_first_fit)(task)
    return bisect(task, known, when_compiled(task.effort))


def _mip(task: Task) -> Result:
    """Run the program from the paper's skyline, with the named solver or the first that takes it."""
    return _program_from(task, _simple("skyline", _paper_skyline)(task))


def _pyramid_mip(task: Task) -> Result:
    """Preplace, then run the program, whose bound holds for the rest alone and proves nothing."""
    placed = replace(task, spans=pyramid(task.spans), log=ProgressLog(task.start))
    result = _program_from(placed, _simple("best fit", size_best_fit)(placed))
    candidate = replace(result.candidate, method=f"pyramid, {result.candidate.method}")
    return Result(candidate, task.bound_bytes, report=result.report)


def _program_from(task: Task, known: Result) -> Result:
    """Run the integer program from a known placement."""
    if task.solver == "none":
        raise SolverUnavailableError("this method is an integer program: name its solver, or auto")
    return run_program(task, known, task.effort)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "auto": place_auto,
        "skyline": _simple("skyline", _paper_skyline),
        "skylines": _skylines,
        "size-first-fit": _simple("size-first-fit", size_first_fit),
        "size-best-fit": _simple("size-best-fit", size_best_fit),
        "pyramid": _simple("pyramid", lambda spans: size_best_fit(pyramid(spans))),
        "pyramid-mip": _pyramid_mip,
        "mip": _mip,
        "search": _search,
        "birth-first-fit": _simple("birth-first-fit", birth_first_fit),
        "caching-allocator": _simple("caching-allocator", replay),
    }
)
