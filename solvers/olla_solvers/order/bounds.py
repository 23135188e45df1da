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

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.graph.minimum_cut import live_bytes, smallest_state
from olla_solvers.problem import Bytes, OperatorIndex, Problem


def precedence_bound(problem: Problem) -> Bytes:
    """Return a peak that no order can beat, found in next to no time; see the module docstring.

    Args:
        problem: the graph.
    """
    flow, _ = flow_of(problem)
    return max(flow.precedence_bytes, default=0)


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
