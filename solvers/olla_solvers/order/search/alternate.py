"""Searches forwards and backwards, from the bound and right below the best order, in turns that grow.

None of the four is best on every graph, and any of them may prove or find what ends all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.order.search.engine import Outcome, Search
from olla_solvers.order.search.rules import ALL_RULES, SearchRules
from olla_solvers.order.search.space import Space
from olla_solvers.problem import Bytes, OperatorIndex

FIRST_BUDGET = 100
"""States that each search expands in its first turn."""

MOST_MEMORY_BYTES = 2 << 30
"""Bytes that the stored states of all searches on a graph may take, roughly."""


class Alternation:
    """Searches on one graph that take turns; can be continued.

    Attributes:
        order: the best order so far.
        peak_bytes: its peak, or the ceiling while no order is below that.
        bound_bytes: proven: no order has a smaller peak.
        expanded: states expanded so far.
    """

    def __init__(
        self,
        flow: FlowGraph,
        order: Sequence[OperatorIndex],
        bound_bytes: Bytes,
        rules: SearchRules = ALL_RULES,
        most_memory_bytes: int = MOST_MEMORY_BYTES,
        ceiling_bytes: Bytes | None = None,
    ) -> None:
        """Prepare.

        Args:
            flow: the graph.
            order: a known order.
            bound_bytes: a proven bound.
            rules: which rules to use.
            most_memory_bytes: what stored states may take, roughly.
            ceiling_bytes: orders with this peak or more are of no use, even if better than the known one.
        """
        self.flow = flow
        self.order = tuple(order)
        self.peak_bytes = flow.peak_bytes(order)
        if ceiling_bytes is not None:
            self.peak_bytes = min(self.peak_bytes, ceiling_bytes)
        self.bound_bytes = min(bound_bytes, self.peak_bytes)
        self.expanded = 0
        self._rules = rules
        self._memory = most_memory_bytes
        self._spaces: dict[bool, Space] = {}
        self._budget = FIRST_BUDGET
        directions = [backward for backward in (False, True) if (rules.forward, rules.backward)[backward]]
        self._turns = [
            (backward, probe)
            for probe in (False, True)
            if rules.probe or not probe
            for backward in directions
        ]
        self._searches: dict[tuple[bool, bool], Search] = {}

    @property
    def is_done(self) -> bool:
        """True if the order is proven, or every search has used up its memory."""
        return self.bound_bytes >= self.peak_bytes or not self._turns

    def learn(self, order: Sequence[OperatorIndex], bound_bytes: Bytes) -> None:
        """Take over an order and a bound that were found elsewhere."""
        peak = self.flow.peak_bytes(order)
        if peak < self.peak_bytes:
            self.order, self.peak_bytes = tuple(order), peak
        self.bound_bytes = min(self.peak_bytes, max(self.bound_bytes, bound_bytes))

    def run(self, deadline: float, most_states: int | None = None) -> None:
        """Take turns until done, the deadline has passed, or so many states have been expanded."""
        last = None if most_states is None else self.expanded + most_states
        while not self.is_done:
            for turn in tuple(self._turns):
                if self.is_done or time.monotonic() > deadline:
                    return
                if last is not None and self.expanded >= last:
                    return
                self._take_turn(turn, deadline)
            self._budget += self._budget // 2

    def _take_turn(self, turn: tuple[bool, bool], deadline: float) -> None:
        backward, probe = turn
        try:
            space = self._space(backward, deadline)
        except DeadlinePassedError:
            return
        search = self._searches.get(turn)
        if search is None or (probe and search.ceiling_bytes != self.peak_bytes):
            start = self.peak_bytes - 1 if probe else self.bound_bytes
            memory = self._memory // len(self._turns)
            search = Search(space, self._rules, start, self.peak_bytes, memory)
            self._searches[turn] = search
        search.ceiling_bytes = self.peak_bytes
        if not probe:
            search.raise_to(self.bound_bytes)
        before = search.expanded
        outcome = search.run(self._budget, deadline)
        self.expanded += search.expanded - before
        self._take(search, outcome, turn)

    def _take(self, search: Search, outcome: Outcome, turn: tuple[bool, bool]) -> None:
        """Take over an order or a bound from a turn."""
        if search.order is not None:
            peak = self.flow.peak_bytes(search.order)
            if peak < self.peak_bytes:
                self.order, self.peak_bytes = search.order, peak
        if outcome is Outcome.EXHAUSTED:
            self.bound_bytes = self.peak_bytes
        elif not turn[1]:
            self.bound_bytes = min(self.peak_bytes, max(self.bound_bytes, search.peak_bytes))
        if outcome is Outcome.MEMORY:
            self._turns.remove(turn)
            del self._searches[turn]

    def _space(self, backward: bool, deadline: float) -> Space:
        if backward not in self._spaces:
            lazy = self._rules.lazy
            self._spaces[backward] = Space(self.flow, backward=backward, lazy=lazy, deadline=deadline)
        return self._spaces[backward]
