"""Finds a bound from all orders of a few key operators.

Project an order onto a set K of operators: it passes them in some sequence. If it runs v of K when just
those of X, a subset of K, have run, it does so from a state that holds the ancestors of v and of X, and X,
but neither what is left of K nor what follows from it. What is alive there is at least the minimum cut
between these two (:mod:`olla_solvers.graph.minimum_cut`), and v adds its rise: call that the step's cost.
So the order's peak is at least the largest step cost of its sequence, and the smallest peak is at least the
smallest, over all sequences of K, of the largest step cost. That is a shortest path from the empty set to K
if lengths are combined by their maximum, found by Dijkstra's algorithm over subsets; the largest cost it
has taken up so far is a bound at any moment.

With a single operator this is the min-cut bound. On graphs so wide that every operator can run from some
small state, what keeps the peak up is that no state is small for all sequences of a few.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.graph.minimum_cut import live_bytes, smallest_state
from olla_solvers.problem import Bytes, OperatorIndex

MOST_KEYS = 16
"""Key operators at most: the sets that must be looked at can double with each."""

MOST_STATES = 64
"""Small states that are remembered: if one lies between the two, no cut is needed."""


class Projection:
    """The bound for ever more key operators; can be continued.

    Attributes:
        bound_bytes: proven so far.
        is_done: True if more key operators are of no use, or too many.
    """

    def __init__(self, flow: FlowGraph, bound_bytes: Bytes) -> None:
        """Start from a proven bound."""
        self._flow = flow
        self.bound_bytes = bound_bytes
        self.is_done = False
        self._keys = key_operators(flow)
        self._count = min(2, len(self._keys))
        self._walk: _Walk | None = None

    def learn(self, bound_bytes: Bytes) -> None:
        """Take over a bound that was proven elsewhere."""
        self.bound_bytes = max(self.bound_bytes, bound_bytes)

    def run(self, peak_bytes: Bytes, deadline: float) -> None:
        """Lift the bound until it is done, or the deadline has passed.

        Args:
            peak_bytes: of a known order: a bound as high proves it.
            deadline: ``time.monotonic()`` at which to stop.
        """
        while not self.is_done and self.bound_bytes < peak_bytes and time.monotonic() < deadline:
            if self._walk is None:
                self._walk = _Walk(self._flow, self._keys[: self._count])
            try:
                self.bound_bytes = max(self.bound_bytes, self._walk.run(self.bound_bytes, deadline))
            except DeadlinePassedError:
                self.bound_bytes = max(self.bound_bytes, self._walk.reached_bytes)
                return
            self._walk = None
            self.is_done = self._count >= min(MOST_KEYS, len(self._keys))
            self._count += 1


def key_operators(flow: FlowGraph) -> tuple[OperatorIndex, ...]:
    """Return operators of which none precedes another, those with most ancestors and descendants first."""
    freedom = [
        min(above.bit_count(), below.bit_count())
        for above, below in zip(flow.ancestors, flow.descendants, strict=True)
    ]
    keys: list[OperatorIndex] = []
    related = 0
    for operator in sorted(range(flow.count), key=lambda v: -freedom[v]):
        if len(keys) == MOST_KEYS:
            break
        if not related >> operator & 1:
            keys.append(operator)
            related |= flow.ancestors[operator] | flow.descendants[operator]
    return tuple(keys)


class _Walk:
    """Dijkstra's algorithm over the subsets of some key operators, as bitsets of their positions.

    Attributes:
        reached_bytes: the largest step cost taken up so far.
    """

    def __init__(self, flow: FlowGraph, keys: Sequence[OperatorIndex]) -> None:
        self._flow = flow
        self._keys = keys
        self._heap: list[tuple[Bytes, int, int]] = [(0, 0, 0)]
        self._number = itertools.count(1)
        self._done: set[int] = set()
        self._small: list[tuple[int, Bytes]] = []
        self.reached_bytes: Bytes = 0

    def run(self, bound_bytes: Bytes, deadline: float) -> Bytes:
        """Return the bound. Steps up to the given one need not be told apart.

        Raises:
            DeadlinePassedError: if the deadline passes; can be continued.
        """
        everything = (1 << len(self._keys)) - 1
        while True:
            entry = heapq.heappop(self._heap)
            cost, _, passed = entry
            self.reached_bytes = max(self.reached_bytes, cost)
            if passed == everything:
                return self.reached_bytes
            if passed in self._done:
                continue
            try:
                reached = self._following(passed, max(bound_bytes, cost), deadline)
            except DeadlinePassedError:
                heapq.heappush(self._heap, entry)
                raise
            self._done.add(passed)
            for following, step in reached:
                heapq.heappush(self._heap, (max(cost, step), next(self._number), following))

    def _following(self, passed: int, enough: Bytes, deadline: float) -> list[tuple[int, Bytes]]:
        """Return the sets one key further on, with the step's cost, or with any up to ``enough``."""
        flow = self._flow
        low, high = 0, (1 << flow.count) - 1
        for bit, key in enumerate(self._keys):
            if passed >> bit & 1:
                low |= flow.ancestors[key] | 1 << key
            else:
                high &= ~(flow.descendants[key] | 1 << key)
        reached = []
        for bit, key in enumerate(self._keys):
            following = passed | 1 << bit
            if following != passed and following not in self._done:
                least = self._least(low | flow.ancestors[key], high, enough - flow.rise_bytes[key], deadline)
                reached.append((following, least + flow.rise_bytes[key]))
        return reached

    def _least(self, low: int, high: int, enough: Bytes, deadline: float) -> Bytes:
        """Return the bytes alive in the smallest state between two, or in any with at most ``enough``."""
        for state, live in self._small:
            if live <= enough and not low & ~state and not state & ~high:
                return live
        least, state = smallest_state(self._flow, low, high, live_bytes(self._flow, low), deadline)
        self._small = [(state, least), *self._small[: MOST_STATES - 1]]
        return least
