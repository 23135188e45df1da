"""Gives every span an offset in one buffer, as low as possible.

Combinatorial methods first: the skyline of the profile-guided allocation paper under several rules and in
both directions of time, stopping at the bound. The MIP of OLLA equation 15 follows where a gap stays and
the model is small, or where a solver is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from olla_solvers.errors import ProblemError
from olla_solvers.place.bound import max_live_bytes
from olla_solvers.place.first_fit import first_fit
from olla_solvers.place.skyline import RULES, height_bytes, reversed_time, skyline
from olla_solvers.place.spans import spans_of
from olla_solvers.plan import Placement, Span
from olla_solvers.problem import Offset

__all__ = ["place", "spans_of"]


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
    _check(spans)
    bound = max_live_bytes(spans)
    best: tuple[Offset, ...] | None = None
    found_by = "none"
    for method, offsets in _combinatorial(spans):
        if best is None or height_bytes(spans, offsets) < height_bytes(spans, best):
            best, found_by = offsets, method
        if height_bytes(spans, best) == bound:
            break
    offsets = best or ()
    height = height_bytes(spans, offsets)
    return Placement(
        offsets=offsets,
        height_bytes=height,
        lower_bound_bytes=bound,
        found_by=found_by,
        proved_by="live bytes" if height == bound else None,
        seconds=time.monotonic() - start,
    )


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
