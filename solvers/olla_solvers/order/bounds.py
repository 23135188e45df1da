"""Bounds that no order can beat, found without looking for an order.

Precedence bound: while operator v runs, whatever an ancestor made and v or a descendant reads is alive
(:attr:`~olla_solvers.order.flow.FlowGraph.precedence_bytes`).

Min-cut bound: every order runs v from some state that holds v's ancestors and neither v nor its
descendants. The smallest live(S) over all such states, a minimum cut
(:mod:`olla_solvers.order.search.cut`), plus v's rise, is needed in every order. The precedence bound counts
only what is alive in all these states, so it is never larger.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from olla_solvers.order.contract import contract
from olla_solvers.order.flow import FlowGraph, flow_of
from olla_solvers.order.search.cut import DeadlinePassedError, live_bytes, smallest_state
from olla_solvers.order.split import split
from olla_solvers.problem import Bytes, OperatorIndex, Problem


def mincut_bound(problem: Problem, time_limit: float | None = None) -> Bytes:
    """Bytes that some operator needs in every order, by minimum cuts in the contracted graph.

    Args:
        problem: the graph.
        time_limit: seconds; None for as long as it takes. What is found by then is a bound, too.

    Returns:
        A bound, at least the precedence bound; no order's peak is smaller.
    """
    deadline = float("inf") if time_limit is None else time.monotonic() + time_limit
    flow, _ = flow_of(problem)
    contracted = contract(flow)
    bound = max(contracted.floor_bytes, *flow.precedence_bytes, 0)
    for piece in split(contracted.flow):
        order = range(piece.flow.count)
        bound = max(bound, mincut_bytes(piece.flow, order, bound, deadline))
    return bound


def mincut_bytes(
    flow: FlowGraph, order: Sequence[OperatorIndex], bound_bytes: Bytes, deadline: float
) -> Bytes:
    """The largest bound that the minimum cut at any operator gives.

    A cut at v is at most what any state before v costs; the states of a known order, and those that
    earlier cuts found, rule most operators out.

    Args:
        flow: the graph.
        order: any order of it; a good one saves time.
        bound_bytes: a proven bound to start from.
        deadline: ``time.monotonic()`` at which to stop.

    Returns:
        A bound, at least the given one.
    """
    bound = max(bound_bytes, *flow.precedence_bytes, 0)
    at_most = dict(zip(order, flow.costs(order), strict=True))
    heap = [(-cost, operator) for operator, cost in at_most.items() if cost > bound]
    heapq.heapify(heap)
    everything = (1 << flow.count) - 1
    while heap and -heap[0][0] > bound and time.monotonic() < deadline:
        cost, operator = heapq.heappop(heap)
        if -cost > at_most[operator]:
            if at_most[operator] > bound:
                heapq.heappush(heap, (-at_most[operator], operator))
            continue
        low = flow.ancestors[operator]
        high = everything & ~flow.descendants[operator] & ~(1 << operator)
        try:
            least, state = smallest_state(flow, low, high, live_bytes(flow, low), deadline)
        except DeadlinePassedError:
            break
        bound = max(bound, least + flow.rise_bytes[operator])
        for other in range(flow.count):
            if not state >> other & 1 and not flow.ancestors[other] & ~state:
                at_most[other] = min(at_most[other], least + flow.rise_bytes[other])
    return bound
