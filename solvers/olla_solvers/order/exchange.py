"""Improves an order by moving operators across its costliest step.

What is alive at the costliest step shrinks when an operator before it that need not be, with the
operators that follow from it, is put off until after it; or when one after it, with what that needs, is
run before it. Every such move is tried and the one with the lowest peak taken, as long as it is lower.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from olla_solvers.graph.flow import FlowGraph
from olla_solvers.problem import Bytes, OperatorIndex

MOST_STEPS = 600_000
"""Operators that may be passed over in all trials: what bounds the time spent on a graph."""


def exchange(
    flow: FlowGraph,
    starts: Iterable[Sequence[OperatorIndex]],
    bound_bytes: Bytes,
    deadline: float,
) -> tuple[OperatorIndex, ...]:
    """Move operators, from several orders, until no move helps.

    Args:
        flow: the graph.
        starts: orders to start from, the most promising first; at least one.
        bound_bytes: stop at an order that needs no more.
        deadline: ``time.monotonic()`` at which to stop.

    Returns:
        The best order met; at most the peak of the best start tried.
    """
    best: tuple[OperatorIndex, ...] | None = None
    peak, steps = 0, MOST_STEPS
    for start in starts:
        order, steps = _descend(flow, tuple(start), bound_bytes, steps, deadline)
        reached = flow.peak_bytes(order)
        if best is None or reached < peak:
            best, peak = order, reached
        if peak <= bound_bytes or steps <= 0 or time.monotonic() > deadline:
            break
    return best or ()


def _descend(
    flow: FlowGraph, order: tuple[OperatorIndex, ...], bound_bytes: Bytes, steps: int, deadline: float
) -> tuple[tuple[OperatorIndex, ...], int]:
    """The best order reached from one start, and the steps that are left."""
    peak = flow.peak_bytes(order)
    improved = True
    while improved and peak > bound_bytes:
        improved = False
        for neighbour in _neighbours(flow, order):
            cost, passed = _peak_below(flow, neighbour, peak)
            steps -= passed
            if cost is not None:
                order, peak, improved = neighbour, cost, True
            if steps <= 0 or time.monotonic() > deadline:
                return order, steps
    return order, steps


def _peak_below(flow: FlowGraph, order: Sequence[OperatorIndex], limit: Bytes) -> tuple[Bytes | None, int]:
    """An order's peak, or None where it reaches the limit; and the operators passed over to find out."""
    unread = [len(array.consumers) for array in flow.arrays]
    live = peak = 0
    for passed, operator in enumerate(order, start=1):
        peak = max(peak, live + flow.rise_bytes[operator])
        if peak >= limit:
            return None, passed
        live += flow.made_bytes[operator]
        for index in flow.inputs[operator]:
            unread[index] -= 1
            if unread[index] == 0:
                live -= flow.arrays[index].size_bytes
    return peak, len(order)


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
