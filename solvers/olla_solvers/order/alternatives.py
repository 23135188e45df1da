"""Finds other orders with the same peak: if one cannot be placed without a gap, another often can.

OLLA §4.4 orders first and then places what the order left. The peak says nothing about how well the arrays
at it fit together, and most graphs have many orders of one peak: every greedy rule has its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import flow_of
from olla_solvers.graph.split import split
from olla_solvers.order.greedy import RULES, best_order, list_schedule
from olla_solvers.problem import Bytes, OperatorIndex, Problem

MOST_OPERATORS = 5000
"""Larger graphs are left as they are: each order and its placement would take seconds."""


def orders_of_peak(problem: Problem, peak_bytes: Bytes) -> Iterator[tuple[str, tuple[OperatorIndex, ...]]]:
    """Yield orders by the greedy rules, on the contracted graph, that need no more than a peak.

    Args:
        problem: the graph.
        peak_bytes: what an order may need.

    Yields:
        The rule and an order, each order once; none if greedy does not reach the peak.
    """
    if len(problem.operators) > MOST_OPERATORS:
        return
    flow, captured = flow_of(problem)
    # Without a deadline, so that the orders follow from the graph alone.
    contracted = contract(flow, float("inf"))
    pieces = split(contracted.flow)
    known = [best_order(piece.flow, peak_bytes, float("inf")) for piece in pieces]
    if any(candidate.peak_bytes > peak_bytes for candidate in known):
        return
    seen = set()
    for name, (rule, backwards) in RULES.items():
        orders = [
            list_schedule(piece.flow, rule, backwards=backwards, below_bytes=peak_bytes + 1)
            or candidate.order
            for piece, candidate in zip(pieces, known, strict=True)
        ]
        expanded = (piece.expand(order) for piece, order in zip(pieces, orders, strict=True))
        order = contracted.expand([operator for inner in expanded for operator in inner])
        if order not in seen and flow.peak_bytes(order) <= peak_bytes:
            seen.add(order)
            yield f"greedy:{name}, contracted", tuple(captured[operator] for operator in order)
