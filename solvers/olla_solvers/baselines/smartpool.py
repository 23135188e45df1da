"""SmartPool's fits, and the same walk in the sequence of allocation.

SmartPool ("Efficient Memory Management for GPU-based Deep Learning Systems", §III-C) places the largest array
first, into the lowest or into the smallest hole. An allocator without a plan sees arrays by birth.
"""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.place.greedy import by_size, greedy
from olla_solvers.plan import Span
from olla_solvers.problem import Offset


def size_first_fit(spans: Sequence[Span]) -> tuple[Offset, ...]:
    """Place the largest span first, each into the lowest hole."""
    return greedy(spans, by_size)


def size_best_fit(spans: Sequence[Span]) -> tuple[Offset, ...]:
    """Place the largest span first, each into the smallest hole."""
    return greedy(spans, by_size, best_fit=True)


def birth_first_fit(spans: Sequence[Span]) -> tuple[Offset, ...]:
    """Place the eldest span first, each into the lowest hole; spans born together in the given sequence."""
    return greedy(spans, lambda span: (span.lower,))
