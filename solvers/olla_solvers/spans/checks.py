"""Checks of spans before they are placed: each by itself, their sums, and the offsets that are given."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from olla_solvers.errors import InfeasibleError, ProblemError
from olla_solvers.plan import Span
from olla_solvers.problem import MOST_BYTES


def check(spans: Sequence[Span]) -> None:
    """Refuse spans that cannot be placed.

    Args:
        spans: rectangles.

    Raises:
        ProblemError: on a name that occurs twice, a span that is empty in time or has a negative size, an
            offset that is negative or breaks its alignment, and numbers whose sums do not fit 64 bits.
        InfeasibleError: if two given offsets collide.
    """
    names: set[str] = set()
    for span in spans:
        if span.name in names:
            raise ProblemError(f"span {span.name!r} occurs twice")
        names.add(span.name)
        fault = fault_of(span)
        if fault is not None:
            raise ProblemError(f"span {span.name!r} {fault}")
    free = [span for span in spans if span.offset is None]
    given = (span.offset + span.size_bytes for span in spans if span.offset is not None)
    # If every span went above all others, as no method does, the last one would end here.
    top = max(given, default=0) + sum(span.size_bytes + span.alignment - 1 for span in free)
    if max(top, sum(span.size_bytes for span in spans)) >= MOST_BYTES:
        largest = max(spans, key=lambda span: span.size_bytes + span.alignment)
        raise ProblemError(
            "the spans' sizes with their alignments and given offsets together reach 2**62 B; the largest is "
            f"{largest.name!r}, {largest.size_bytes} B at a multiple of {largest.alignment}"
        )
    check_given(spans)


def fault_of(span: Span) -> str | None:
    """Return the fault of a span, in words that follow its name; None if it has none."""
    if span.upper <= span.lower:
        return f"has an empty lifetime [{span.lower}, {span.upper})"
    if span.size_bytes < 0:
        return f"has a negative size ({span.size_bytes} B)"
    if span.alignment < 1:
        return f"has alignment {span.alignment}, below 1"
    if span.offset is not None and (span.offset < 0 or span.offset % span.alignment):
        return (
            f"is given offset {span.offset}, which must be a multiple of its alignment {span.alignment} "
            "and not negative"
        )
    if max(abs(span.lower), abs(span.upper), span.alignment, span.offset or 0) >= MOST_BYTES:
        return "has a number beyond 2**62"
    return None


def check_given(spans: Sequence[Span]) -> None:
    """Refuse given offsets that collide.

    Raises:
        InfeasibleError: naming two spans whose given offsets overlap.
    """
    clash = given_collision(spans)
    if clash is not None:
        first, second = (repr(spans[index].name) for index in clash)
        raise InfeasibleError(f"the given offsets of {first} and {second} overlap")


def given_collision(spans: Sequence[Span]) -> tuple[int, int] | None:
    """Return the indices of two spans whose given offsets overlap, or None if no two do.

    The spans alive are kept by offset: while none of them collide, a new one hits a neighbour first.
    """
    given = [
        (i, (span.offset, span.offset + span.size_bytes, i))
        for i, span in enumerate(spans)
        if span.offset is not None and span.size_bytes > 0
    ]
    events = sorted(
        [(spans[i].lower, 1, extent) for i, extent in given]
        + [(spans[i].upper, 0, extent) for i, extent in given]
    )
    alive: list[tuple[int, int, int]] = []
    for _, is_birth, extent in events:
        position = bisect.bisect_left(alive, extent)
        if not is_birth:
            del alive[position]
            continue
        low, high, index = extent
        if position > 0 and alive[position - 1][1] > low:
            return alive[position - 1][2], index
        if position < len(alive) and alive[position][0] < high:
            return alive[position][2], index
        alive.insert(position, extent)
    return None
