"""What is asked of spans before they are placed, and what their offsets must fulfil."""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.errors import ProblemError
from olla_solvers.plan import Span
from olla_solvers.problem import MOST_BYTES


def check(spans: Sequence[Span]) -> None:
    """Refuse spans that cannot be placed.

    Args:
        spans: rectangles.

    Raises:
        ProblemError: on a name that occurs twice, a span that is empty in time or has a negative size, an
            offset that is negative or breaks its alignment, and numbers whose sums do not fit 64 bits.
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
    # Where every span goes above all others, as no method does, the last one ends here.
    top = max(given, default=0) + sum(span.size_bytes + span.alignment - 1 for span in free)
    if max(top, sum(span.size_bytes for span in spans)) >= MOST_BYTES:
        largest = max(spans, key=lambda span: span.size_bytes + span.alignment)
        raise ProblemError(
            "the spans' sizes with their alignments and given offsets together reach 2**62 B; the largest is "
            f"{largest.name!r}, {largest.size_bytes} B at a multiple of {largest.alignment}"
        )


def fault_of(span: Span) -> str | None:
    """What is wrong with one span, in words that follow its name; None where nothing is."""
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
