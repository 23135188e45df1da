"""Every method of placement by its name: the papers', the baselines, and our own.

auto                what :func:`olla_solvers.place.place` does by default: all that helps, in turn
skyline             best fit on a skyline, longest lifetime first (profile-guided allocation, §3.2)
skylines            that under six tie-breaks with time running either way, stopping at the bound
size-first-fit      the largest array first, into the lowest hole (SmartPool §III-C)
size-best-fit       the largest array first, into the smallest hole (SmartPool §III-C)
pyramid             preplacement (OLLA, Function 5), greedy best fit for the rest
pyramid-mip         preplacement, the integer program for the rest (OLLA §4.5)
mip                 the integer program (OLLA equation 15, profile-guided allocation (1)-(6))
search              the exact search of ``place/search`` alone
birth-first-fit     arrays in the sequence of allocation, into the lowest hole
caching-allocator   what the CUDA caching allocator would do
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from olla_solvers.baselines.caching_allocator import replay
from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp.place_spans import solve_with, solve_with_any
from olla_solvers.paper.pyramid import pyramid
from olla_solvers.place.auto import Result, place_auto
from olla_solvers.place.bisection import Task, close_gap, when_compiled
from olla_solvers.place.candidate import Found
from olla_solvers.place.greedy import by_birth, by_size, greedy
from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.place.skyline import RULES, skyline
from olla_solvers.plan import SolverReport, Span
from olla_solvers.problem import Offset

LONGEST = RULES["longest lifetime"]
"""The paper's rule."""

Method = Callable[[Task], Result]


def _simple(name: str, offsets_of: Callable[[Sequence[Span]], Sequence[Offset]]) -> Method:
    """A method that computes one placement and proves nothing."""

    def run(task: Task) -> Result:
        return _unproven(task, Found.of(task.spans, offsets_of(task.spans), name))

    return run


def _unproven(task: Task, found: Found) -> Result:
    """A placement that only the live bytes can prove."""
    proved_by = "live bytes" if found.height_bytes == task.bound_bytes else None
    return Result(found, task.bound_bytes, proved_by, SolverReport("none"))


def _skylines(task: Task) -> Result:
    return _unproven(task, best_of_heuristics(task.spans, task.goal_bytes, log=task.log))


def _search(task: Task) -> Result:
    """The search, beside what an allocator without a plan does."""
    known = Found.of(task.spans, greedy(task.spans, by_birth), "birth-first-fit")
    aimed = close_gap(task, known, when_compiled(task.effort))
    proved_by = None
    if aimed.found.height_bytes == aimed.bound_bytes:
        proved_by = "live bytes" if aimed.bound_bytes == task.bound_bytes else "search"
    return Result(aimed.found, aimed.bound_bytes, proved_by, SolverReport("none"))


def _mip(task: Task) -> Result:
    """The program from the paper's skyline, with the named solver or the first that takes it."""
    return _run_program(task, Found.of(task.spans, skyline(task.spans, LONGEST), "skyline"))


def _pyramid_mip(task: Task) -> Result:
    """Preplacement, then the program, whose bound holds for the rest alone and proves nothing."""
    placed = pyramid(task.spans)
    known = Found.of(placed, greedy(placed, by_size, best_fit=True), "best fit")
    result = _run_program(replace(task, spans=placed), known)
    found = replace(result.found, method=f"pyramid, {result.found.method}")
    return replace(_unproven(task, found), report=result.report)


def _run_program(task: Task, known: Found) -> Result:
    """The integer program from a known placement."""
    bound, deadline = task.bound_bytes, task.effort.deadline
    if task.solver == "none":
        raise SolverUnavailableError("this method is an integer program: name its solver, or auto")
    if task.solver == "auto":
        found, report = solve_with_any(task.spans, known, bound, deadline)
    else:
        found, report = solve_with(task.spans, known, bound, task.solver, deadline)
    proven = max(bound, report.bound_bytes or 0)
    proved_by = None
    if found.height_bytes == proven:
        proved_by = "live bytes" if proven == bound else f"mip:{report.solver}"
    return Result(found, proven, proved_by, report)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "auto": place_auto,
        "skyline": _simple("skyline", lambda spans: skyline(spans, LONGEST)),
        "skylines": _skylines,
        "size-first-fit": _simple("size-first-fit", lambda spans: greedy(spans, by_size)),
        "size-best-fit": _simple("size-best-fit", lambda spans: greedy(spans, by_size, best_fit=True)),
        "pyramid": _simple("pyramid", lambda spans: greedy(pyramid(spans), by_size, best_fit=True)),
        "pyramid-mip": _pyramid_mip,
        "mip": _mip,
        "search": _search,
        "birth-first-fit": _simple("birth-first-fit", lambda spans: greedy(spans, by_birth)),
        "caching-allocator": _simple("caching-allocator", replay),
    }
)
