"""Gives every span an offset in one buffer, as low as possible.

``auto.py`` has the stages: skylines, the exact search, the integer program. What is compiled runs in a
process of its own, if enough can be gained (:mod:`olla_solvers.effort.patience`). Other methods by name, and
placing within a capacity, are in :mod:`olla_solvers.placer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.effort.patience import Patience
from olla_solvers.ilp import backends
from olla_solvers.place.auto import place_patiently
from olla_solvers.plan import Placement, Span
from olla_solvers.spans import spans_of

__all__ = ["place", "place_patiently", "spans_of"]


def place(spans: Sequence[Span], *, solver: str = "auto", time_limit: float | None = None) -> Placement:
    """Place spans so that no two alive together share a byte, as low as possible.

    Args:
        spans: rectangles; those with an offset keep it, and every offset is a multiple of its alignment.
        solver: of the integer program: ``auto``, ``cbc``, ``gurobi``, ``highs`` (the program really runs) or
            ``none``.
        time_limit: seconds for everything, for a proof; None for as long as enough can be gained. Compiling
            the search, which happens once on a machine, counts, too.

    Returns:
        Offsets, their height and the bound on it.

    Raises:
        ProblemError: if a span is empty in time, has a negative size, or a misaligned given offset.
        OptionError: if the time limit is not a number of seconds.
        InfeasibleError: if two given offsets collide.
        SolverUnavailableError: if the named solver is unknown, missing or not licensed.
    """
    backends.check_options(solver, time_limit)
    return place_patiently(spans, Patience.of(time_limit, insists=solver in backends.SOLVERS), solver=solver)
