"""Gives every span an offset in one buffer, as low as possible.

Combinatorial methods first: the skyline of the profile-guided allocation paper under several rules and in
both directions of time, stopping at the bound. The MIP of OLLA equation 15 follows where a gap stays and
the model is small, or where a solver is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from olla_solvers import backends
from olla_solvers.errors import ProblemError, SolverUnavailableError
from olla_solvers.place.bound import max_live_bytes
from olla_solvers.place.first_fit import first_fit
from olla_solvers.place.mip import is_free_of_collisions, overlapping_pairs, place_program
from olla_solvers.place.skyline import RULES, height_bytes, reversed_time, skyline
from olla_solvers.place.spans import spans_of
from olla_solvers.plan import Placement, SolverEffect, SolverReport, SolverStatus, Span
from olla_solvers.problem import Bytes, Offset

__all__ = ["place", "spans_of"]

DEFAULT_SECONDS = 30.0
"""Time limit of the integer program where none is given."""

MOST_PAIRS = 50_000
"""Larger programs are not stated even for a named solver, and those that no licence takes only where they
could still help: where the placement is above its bound."""

MOST_AUTO_PAIRS = 400
"""Without a named solver, programs with more pairs alive together are not tried: they find nothing."""


def place(spans: Sequence[Span], *, solver: str = "auto", time_limit: float | None = None) -> Placement:
    """Place spans so that no two alive together share a byte, as low as possible.

    Args:
        spans: rectangles; those with an offset keep it.
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` (the MIP really runs) or ``none``.
        time_limit: seconds for the MIP; None for the default of at most about 30.

    Returns:
        Offsets, their height and the bound on it.

    Raises:
        ProblemError: on a span that is empty in time, has a negative size, or a misaligned given offset.
        InfeasibleError: when two given offsets collide.
        SolverUnavailableError: when the named solver is unknown, missing or not licensed.
    """
    start = time.monotonic()
    deadline = start + (DEFAULT_SECONDS if time_limit is None else time_limit)
    if solver not in ("auto", "none"):
        backends.require(solver)
    _check(spans)
    bound = max_live_bytes(spans)
    known = _best(spans, bound)
    best, report = known, SolverReport("none")
    for candidate in _solvers(solver, spans, known.height_bytes > bound):
        try:
            best, report = _solve(spans, known, bound, candidate, deadline)
        except SolverUnavailableError:
            if solver != "auto":
                raise
            continue
        break
    proved_by = None
    if report.bound_bytes is not None and report.bound_bytes >= best.height_bytes:
        proved_by = f"mip:{report.solver}"
    if best.height_bytes == bound:
        proved_by = "live bytes"
    return Placement(
        offsets=best.offsets,
        height_bytes=best.height_bytes,
        lower_bound_bytes=max(bound, report.bound_bytes or 0),
        found_by=best.method,
        proved_by=proved_by,
        solver=report,
        seconds=time.monotonic() - start,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """Offsets, the height they need, and what found them."""

    offsets: tuple[Offset, ...]
    height_bytes: Bytes
    method: str


def _best(spans: Sequence[Span], bound: Bytes) -> _Found:
    """The best of the combinatorial methods."""
    best: _Found | None = None
    for method, offsets in _combinatorial(spans):
        found = _Found(offsets, height_bytes(spans, offsets), method)
        if best is None or found.height_bytes < best.height_bytes:
            best = found
        if best.height_bytes == bound:
            break
    return best or _Found((), 0, "none")


def _solvers(solver: str, spans: Sequence[Span], gap: bool) -> tuple[str, ...]:
    """The solvers to try in turn: the named one, or with ``auto`` those that may close the gap."""
    if solver == "none":
        return ()
    if solver != "auto":
        return (solver,)
    if not gap or len(overlapping_pairs(spans)) > MOST_AUTO_PAIRS:
        return ()
    return backends.available_solvers()


def _solve(
    spans: Sequence[Span], known: _Found, bound: Bytes, solver: str, deadline: float
) -> tuple[_Found, SolverReport]:
    """Run the program from a known placement, which stays unless the program's is lower."""
    begin = time.monotonic()
    pairs = len(overlapping_pairs(spans))
    too_large = pairs > MOST_PAIRS or not backends.may_take(solver, pairs + len(spans) + 1, 2 * pairs)
    if pairs > MOST_PAIRS or (too_large and known.height_bytes == bound):
        status = SolverStatus.NOT_RUN if known.height_bytes == bound else SolverStatus.FAILED
        return known, SolverReport(solver, status, detail=f"not stated: {pairs} pairs are alive together")
    program = place_program(spans, known.offsets, bound)
    remaining = max(0.1, deadline - time.monotonic())
    solution = backends.solve(program.model, solver, time_limit=remaining)
    best = known
    if solution.values is not None:
        offsets = program.decode(spans, solution.values)
        height = height_bytes(spans, offsets)
        if height < known.height_bytes and is_free_of_collisions(spans, offsets):
            best = _Found(offsets, height, f"mip:{solver}")
    value = best.height_bytes // program.unit_bytes
    proven = backends.proven_units(solution, value)
    effect = SolverEffect.CONFIRMED if proven == value else SolverEffect.NONE
    report = SolverReport(
        solver=solver,
        status=backends.report_status(solution.outcome, proven=proven == value),
        effect=SolverEffect.IMPROVED if best is not known else effect,
        objective_bytes=best.height_bytes,
        bound_bytes=None if proven is None else proven * program.unit_bytes,
        variables=len(program.model.lower),
        constraints=len(program.model.rows),
        seconds=time.monotonic() - begin,
        detail=solution.detail,
    )
    return best, report


def _check(spans: Sequence[Span]) -> None:
    names: set[str] = set()
    for span in spans:
        if span.name in names:
            raise ProblemError(f"span {span.name!r} occurs twice")
        names.add(span.name)
        if span.upper <= span.lower:
            raise ProblemError(f"span {span.name!r} has an empty lifetime [{span.lower}, {span.upper})")
        if span.size_bytes < 0:
            raise ProblemError(f"span {span.name!r} has a negative size ({span.size_bytes} B)")
        if span.alignment < 1:
            raise ProblemError(f"span {span.name!r} has alignment {span.alignment}, below 1")
        if span.offset is not None and (span.offset < 0 or span.offset % span.alignment):
            raise ProblemError(
                f"span {span.name!r} is given offset {span.offset}, which must be a multiple of its "
                f"alignment {span.alignment} and not negative"
            )


def _combinatorial(spans: Sequence[Span]) -> Iterator[tuple[str, tuple[Offset, ...]]]:
    """Every fast method's placement, lazily, the paper's rule first."""
    if any(span.offset is not None for span in spans):
        for name, rule in RULES.items():
            yield f"first fit:{name}", first_fit(spans, rule)
        return
    backwards = reversed_time(spans)
    for name, rule in RULES.items():
        yield f"skyline:{name}", skyline(spans, rule)
        yield f"skyline:{name}, time reversed", skyline(backwards, rule)
