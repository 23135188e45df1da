"""The lower bound of placement: the most bytes alive at one timestep.

No two spans alive together may share a byte, so no placement is lower (OLLA §4.4 calls a placement of
this height free of fragmentation).
"""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.plan import Span
from olla_solvers.problem import Bytes


def max_live_bytes(spans: Sequence[Span]) -> Bytes:
    """Most bytes alive at one timestep, or the top of the highest span whose offset is given.

    Args:
        spans: rectangles with half-open lifetimes.

    Returns:
        Bytes that every placement needs.
    """
    events = sorted(
        [(span.lower, span.size_bytes) for span in spans] + [(span.upper, -span.size_bytes) for span in spans]
    )
    alive, most = (
        0,
        max((span.offset + span.size_bytes for span in spans if span.offset is not None), default=0),
    )
    for _, change in events:
        alive += change
        most = max(most, alive)
    return most
