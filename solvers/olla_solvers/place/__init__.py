"""Gives every span an offset in one buffer, as low as possible.

``auto.py`` has the default: skylines, the exact search, the integer program; ``methods.py`` every method by
name, the papers' and the baselines too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from olla_solvers.errors import NoSolutionError, ProblemError
from olla_solvers.ilp import backends
from olla_solvers.place.bisection import Effort, Task, when_compiled
from olla_solvers.place.bound import max_live_bytes
from olla_solvers.place.checks import check
from olla_solvers.place.greedy import check_given
from olla_solvers.place.methods import METHODS
from olla_solvers.place.spans import spans_of
from olla_solvers.plan import Placement, Span
from olla_solvers.problem import Bytes
from olla_solvers.progress import ProgressLog

__all__ = ["METHODS", "place", "spans_of"]

DEFAULT_SECONDS = 30.0
"""Time limit where none is given."""

DEFAULT_WORK = 600_000_000
"""Steps of searching where no time limit is given, about ten seconds: then the result does not depend on the
machine unless that is very slow."""


def place(
    spans: Sequence[Span],
    *,
    solver: str = "auto",
    method: str = "auto",
    capacity_bytes: Bytes | None = None,
    time_limit: float | None = None,
) -> Placement:
    """Place spans so that no two alive together share a byte, as low as possible or within a capacity.

    Args:
        spans: rectangles; those with an offset keep it, and every offset is a multiple of its alignment.
        solver: of the integer program: ``auto``, ``cbc``, ``gurobi``, ``highs`` (the program really runs) or
            ``none``.
        method: a name in :data:`METHODS`.
        capacity_bytes: a height that is low enough; None to go as low as possible.
        time_limit: seconds for everything beyond the heuristics; None for as long as it pays, at most about
            30. Compiling the search, which happens once on a machine, is not counted.

    Returns:
        Offsets, their height and the bound on it.

    Raises:
        ProblemError: on a span that is empty in time, has a negative size, or a misaligned given offset.
        OptionError: when the time limit is no number of seconds.
        InfeasibleError: when two given offsets collide, or a capacity is proven to be too small; names the
            spans that cannot fit together.
        NoSolutionError: when nothing within the capacity was found in the time, nor proven impossible.
        SolverUnavailableError: when the named solver is unknown, missing or not licensed.
    """
    from olla_solvers.infeasible.conflict import refuse_impossible, refuse_proven

    start = time.monotonic()
    backends.check_options(solver, time_limit)
    if method not in METHODS:
        raise ProblemError(f"unknown method {method!r} of placement; one of {', '.join(METHODS)}")
    check(spans)
    check_given(spans)
    bound = max_live_bytes(spans)
    effort = Effort(
        start + (DEFAULT_SECONDS if time_limit is None else time_limit),
        DEFAULT_WORK if time_limit is None else None,
    )
    if capacity_bytes is not None:
        refuse_impossible(spans, capacity_bytes, effort)
    goal = bound if capacity_bytes is None else max(bound, capacity_bytes)
    log = ProgressLog(start, bound)
    result = METHODS[method](Task(spans, bound, goal, capacity_bytes is not None, solver, effort, log))
    height = result.found.height_bytes
    log.note(height, min(result.bound_bytes, height), result.found.method)
    if capacity_bytes is not None and height > capacity_bytes:
        if result.bound_bytes > capacity_bytes:
            refuse_proven(spans, capacity_bytes, when_compiled(effort))
        raise NoSolutionError(
            f"nothing within the capacity of {capacity_bytes} B was found in "
            f"{time.monotonic() - start:.1f} s, nor ruled out; the lowest placement found needs {height} B"
        )
    return Placement(
        offsets=result.found.offsets,
        height_bytes=height,
        lower_bound_bytes=result.bound_bytes,
        found_by=result.found.method,
        proved_by=result.proved_by,
        solver=result.report,
        seconds=time.monotonic() - start,
        progress=log.improvements,
    )
