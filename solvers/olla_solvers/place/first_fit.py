"""First fit in a fixed sequence of spans: the greedy of TFLite and SmartPool.

Slower than the skyline and usually higher, but it takes spans whose offsets are given, which a skyline of
lines cannot go around.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from olla_solvers.errors import InfeasibleError
from olla_solvers.place.skyline import Rule
from olla_solvers.plan import Span
from olla_solvers.problem import Offset


def first_fit(spans: Sequence[Span], rule: Rule) -> tuple[Offset, ...]:
    """Place spans one by one, each at the lowest aligned offset that is free throughout its lifetime.

    Args:
        spans: rectangles; those with an offset stay there.
        rule: sort key; the span with the smallest key goes first.

    Returns:
        An offset for each span.

    Raises:
        InfeasibleError: when two given offsets collide.
    """
    lower = np.array([span.lower for span in spans], dtype=np.int64)
    upper = np.array([span.upper for span in spans], dtype=np.int64)
    bottom = np.zeros(len(spans), dtype=np.int64)
    placed = np.zeros(len(spans), dtype=bool)
    sizes = np.array([span.size_bytes for span in spans], dtype=np.int64)
    given_first = sorted(range(len(spans)), key=lambda i: (spans[i].offset is None, rule(spans[i])))
    for index in given_first:
        span = spans[index]
        if span.size_bytes == 0:
            bottom[index] = span.offset or 0
            continue
        others = np.flatnonzero(placed & (lower < span.upper) & (upper > span.lower))
        if span.offset is None:
            bottom[index] = _lowest_gap(span, bottom[others], sizes[others])
        else:
            clash = others[(bottom[others] < span.offset + span.size_bytes)
                           & (bottom[others] + sizes[others] > span.offset)]  # fmt: skip
            if clash.size:
                other = spans[int(clash[0])].name
                raise InfeasibleError(f"the given offsets of {other!r} and {span.name!r} overlap")
            bottom[index] = span.offset
        placed[index] = True
    return tuple(int(offset) for offset in bottom)


def _lowest_gap(
    span: Span,
    bottoms: np.ndarray[tuple[int], np.dtype[np.int64]],
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Offset:
    offset = 0
    for index in np.argsort(bottoms, kind="stable"):
        if int(bottoms[index]) >= offset + span.size_bytes:
            break
        top = int(bottoms[index] + sizes[index])
        offset = max(offset, -(-top // span.alignment) * span.alignment)
    return offset
