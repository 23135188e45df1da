"""The smallest buffer over all orders and placements of a tiny problem, by trying all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from olla_solvers.place import spans_of
from olla_solvers.plan import Span
from olla_solvers.problem import Problem


def executable_orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every order that respects all edges."""
    count = len(problem.operators)

    def continued(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == count:
            yield order
        for operator in range(count):
            if operator not in order and all(earlier in order for earlier in problem.predecessors[operator]):
                yield from continued((*order, operator))

    return continued(())


def smallest_height(spans: Sequence[Span]) -> int:
    """The lowest top: some sequence puts every span as low as those before it allow in a lowest placement."""
    sized = [span for span in spans if span.size_bytes]
    best = sum(-(-span.size_bytes // span.alignment) * span.alignment for span in sized)
    for sequence in itertools.permutations(sized):
        tops: list[tuple[Span, int]] = []
        for span in sequence:
            floor = max(
                (top for other, top in tops if other.lower < span.upper and span.lower < other.upper),
                default=0,
            )
            tops.append((span, -(-floor // span.alignment) * span.alignment + span.size_bytes))
        best = min(best, max((top for _, top in tops), default=0))
    return best


def smallest_buffer(problem: Problem) -> int:
    """The smallest buffer of any order and placement."""
    return min(smallest_height(spans_of(problem, order)) for order in executable_orders(problem))
