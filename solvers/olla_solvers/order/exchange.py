"""Improves an order by moving operators across its costliest step.

What is alive at the costliest step shrinks when an operator before it that need not be, with the
operators that follow from it, is put off until after it; or when one after it, with what that needs, is
run before it. Every such move is tried and the one with the lowest peak taken, as long as it is lower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from olla_solvers.order.flow import FlowGraph
from olla_solvers.problem import Bytes, OperatorIndex

MOST_TRIALS = 400_000
"""Operators that may be passed over in trials: what bounds the time spent on a graph."""


def exchange(
    flow: FlowGraph, order: Sequence[OperatorIndex], bound_bytes: Bytes, deadline: float
) -> tuple[OperatorIndex, ...]:
    """Move operators until no move helps.

    Args:
        flow: the graph.
        order: where to start.
        bound_bytes: stop at an order that needs no more.
        deadline: ``time.monotonic()`` at which to stop.

    Returns:
        An order with at most the same peak.
    """
    best, trials = tuple(order), 0
    peak = flow.peak_bytes(best)
    while peak > bound_bytes and trials < MOST_TRIALS and time.monotonic() < deadline:
        improved = False
        for neighbour in list(_neighbours(flow, best)):
            trials += flow.count
            cost = flow.peak_bytes(neighbour)
            if cost < peak:
                best, peak, improved = neighbour, cost, True
            if trials >= MOST_TRIALS:
                break
        if not improved:
            break
    return best


def _neighbours(flow: FlowGraph, order: tuple[OperatorIndex, ...]) -> Iterator[tuple[OperatorIndex, ...]]:
    """Orders that differ in what has run at the costliest step."""
    costs = flow.costs(order)
    step = costs.index(max(costs))
    middle, before, after = order[step], order[:step], order[step + 1 :]
    for operator in before:
        if not flow.ancestors[middle] >> operator & 1:
            group = flow.descendants[operator] | 1 << operator
            kept = tuple(each for each in before if not group >> each & 1)
            moved = tuple(each for each in before if group >> each & 1)
            yield (*kept, middle, *moved, *after)
    for operator in after:
        if not flow.descendants[middle] >> operator & 1:
            group = flow.ancestors[operator] | 1 << operator
            moved = tuple(each for each in after if group >> each & 1)
            kept = tuple(each for each in after if not group >> each & 1)
            yield (*before, *moved, middle, *kept)
