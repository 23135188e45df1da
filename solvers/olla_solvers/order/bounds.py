"""Finds bounds that no order can beat, without looking for an order.

Precedence bound: while operator v runs, whatever an ancestor made and v or a descendant reads is alive
(:attr:`~olla_solvers.graph.flow.FlowGraph.precedence_bytes`).

Min-cut bound: every order runs v from some state that holds v's ancestors and neither v nor its
descendants. The smallest live(S) over all such states, a minimum cut
(:mod:`olla_solvers.graph.minimum_cut`), plus v's rise, is needed in every order. The precedence bound counts
only what is alive in all these states, so it is never larger.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from olla_solvers.deadline import DeadlinePassedError
from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.graph.minimum_cut import live_bytes, smallest_state
from olla_solvers.graph.split import split
from olla_solvers.problem import Bytes, OperatorIndex, Problem


def mincut_bound(problem: Problem, time_limit: float | None = None) -> Bytes:
    """Return bytes that some operator needs in every order, by minimum cuts in the contracted graph.

    Args:
        problem: the graph.
        time_limit: seconds; None for as long as it takes. The result is a bound at any time.

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
    """Return the largest bound that the minimum cut at any operator gives.

    Args:
        flow: the graph.
        order: any order of it; a good one saves time.
        bound_bytes: a proven bound to start from.
        deadline: ``time.monotonic()`` at which to stop.

    Returns:
        A bound, at least the given one.
    """
    cuts = MinimumCuts(flow, order, bound_bytes)
    cuts.run(deadline)
    return cuts.bound_bytes


class MinimumCuts:
    """Makes cuts at all operators in turn; can be continued.

    A cut at v is at most what any state before v costs: the states of a known order, and those that earlier
    cuts found, rule most operators out. Those with many ancestors and many descendants come first, as their
    states have the least freedom; on wide random graphs the first few of them give the final bound.

    Attributes:
        bound_bytes: proven so far.
    """

    def __init__(self, flow: FlowGraph, order: Sequence[OperatorIndex], bound_bytes: Bytes) -> None:
        """Start from a known order and a proven bound."""
        self._flow = flow
        self.bound_bytes = max(bound_bytes, *flow.precedence_bytes, 0)
        self._at_most = dict(zip(order, flow.costs(order), strict=True))
        self._waiting = sorted(
            (operator for operator, cost in self._at_most.items() if cost > self.bound_bytes),
            key=lambda v: min(flow.ancestors[v].bit_count(), flow.descendants[v].bit_count()),
        )

    @property
    def is_done(self) -> bool:
        """True if no further cut can lift the bound."""
        return not self._waiting

    def learn(self, bound_bytes: Bytes) -> None:
        """Take over a bound that was proven elsewhere."""
        self.bound_bytes = max(self.bound_bytes, bound_bytes)

    def run(self, deadline: float) -> None:
        """Cut until done, or the deadline has passed."""
        while self._waiting and time.monotonic() < deadline:
            operator = self._waiting[-1]
            if self._at_most[operator] > self.bound_bytes:
                try:
                    self._cut(operator, deadline)
                except DeadlinePassedError:
                    return
            self._waiting.pop()

    def _cut(self, operator: OperatorIndex, deadline: float) -> None:
        flow = self._flow
        low = flow.ancestors[operator]
        high = (1 << flow.count) - 1 & ~flow.descendants[operator] & ~(1 << operator)
        least, state = smallest_state(flow, low, high, live_bytes(flow, low), deadline)
        self.bound_bytes = max(self.bound_bytes, least + flow.rise_bytes[operator])
        for other in self._waiting:
            if not state >> other & 1 and not flow.ancestors[other] & ~state:
                self._at_most[other] = min(self._at_most[other], least + flow.rise_bytes[other])
