"""Searches with one order of trial at a time, in memory of its own and in slices of work."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from olla_solvers.place.search import kernel, layout
from olla_solvers.place.search.instance import Prepared
from olla_solvers.place.search.layout import Ints
from olla_solvers.place.search.portfolio import Attempt
from olla_solvers.place.search.rules import SearchRules

SLICE = 1_000_000
"""Steps of work between two looks at the clock, about 20 ms."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a search gives up; None for never.

    Attributes:
        deadline: on the monotonic clock.
        nodes: placements tried.
        work: steps of work.
    """

    deadline: float | None = None
    nodes: int | None = None
    work: int | None = None

    def are_met(self, nodes: int, work: int) -> bool:
        """Return True if one of them is reached."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        tired = self.work is not None and work >= self.work
        return late or tired or (self.nodes is not None and nodes >= self.nodes)


class SearchThread:
    """A compiled search that can be left and gone on with.

    Attributes:
        nodes: placements tried, for all the orders that it has had.
        work: steps of work, likewise.
    """

    def __init__(self, prepared: Prepared, rules: SearchRules, failed: Ints) -> None:
        """Make room; the stacks grow on demand.

        Args:
            prepared: the instance.
            rules: which pruning rules to use.
            failed: components that failed, shared by all threads; see
                :attr:`~olla_solvers.place.search.layout.State`.
        """
        self.nodes, self.work = 0, 0
        self._prepared, self._switches = prepared, rules.switches()
        self._state = layout.new_state(len(prepared.spans), prepared.sections, failed)
        self._instance: layout.Instance | None = None
        self._outcome = layout.PAUSED

    @property
    def low(self) -> Ints:
        """For each array its offset, once found."""
        return self._state.low

    def proceed(self, attempt: Attempt, limits: Limits, others: tuple[int, int]) -> int:
        """Give an order its turn.

        Args:
            attempt: the order; a lasting one goes on from where it was left.
            limits: of the whole search.
            others: nodes and work that the other threads have spent.

        Returns:
            The kernel's outcome, ``PAUSED`` when the turn or the search is over.
        """
        if attempt.thread is None or self._instance is None:
            self._begin(attempt)
        if self._instance is None or self._outcome in (layout.FOUND, layout.EXHAUSTED):
            return self._outcome
        register = self._state.register
        while True:
            nodes, work = int(register[layout.NODES]), int(register[layout.WORK])
            most = attempt.nodes
            if limits.nodes is not None:
                most = min(most, nodes + limits.nodes - others[0] - self.nodes)
            if nodes >= most or limits.are_met(self.nodes + others[0], self.work + others[1]):
                return layout.PAUSED
            outcome = int(kernel.run(self._instance, self._switches, self._state, most, work + SLICE))
            self.nodes += int(register[layout.NODES]) - nodes
            self.work += int(register[layout.WORK]) - work
            if outcome == layout.NEEDS_ROOM:
                self._state = layout.enlarged(self._state)
            elif outcome != layout.PAUSED:
                self._outcome = outcome
                return outcome

    def _begin(self, attempt: Attempt) -> None:
        """Start from the root with an order."""
        prepared, state = self._prepared, self._state
        self._instance = prepared.ranked(attempt.rank)
        state.low[:] = prepared.low
        state.rank[:] = attempt.rank
        state.placed[:] = 0
        order = np.lexsort([attempt.rank, prepared.low])
        self._outcome = int(kernel.begin(self._instance, self._switches, state, order))
