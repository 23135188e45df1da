"""One order of trial at a time with its own memory: begun, left, gone on with, in slices of work."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from olla_solvers.place.search import kernel, layout
from olla_solvers.place.search.instance import Ints, Prepared
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
        """Whether one of them is reached."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        tired = self.work is not None and work >= self.work
        return late or tired or (self.nodes is not None and nodes >= self.nodes)


class Lane:
    """The compiled search of one order at a time.

    Attributes:
        nodes: placements tried, for all the orders that it has had.
        work: steps of work, likewise.
    """

    def __init__(
        self, prepared: Prepared, rules: SearchRules, blame: Ints, section_blame: Ints, failed: Ints
    ) -> None:
        """Make room; the stacks grow on demand.

        Args:
            prepared: the instance.
            rules: which pruning rules to use.
            blame: for each array how often attempts failed on it, shared by all lanes.
            section_blame: likewise for each section.
            failed: components that failed, likewise; see :attr:`~olla_solvers.place.search.layout.State`.
        """
        self.nodes, self.work = 0, 0
        self._prepared, self._switches = prepared, rules.switches()
        self._state = _state(prepared, blame, section_blame, failed)
        self._instance: layout.Instance | None = None
        self._outcome = layout.PAUSED

    @property
    def low(self) -> Ints:
        """For each array its offset in units, once found."""
        return self._state.low

    def proceed(self, attempt: Attempt, limits: Limits, others: tuple[int, int]) -> int:
        """Give an order its turn.

        Args:
            attempt: the order; a lasting one goes on from where it was left.
            limits: of the whole search.
            others: nodes and work that the other lanes have spent.

        Returns:
            The kernel's outcome, ``PAUSED`` when the turn or the search is over.
        """
        if attempt.lane is None or self._instance is None:
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
                self._grow()
            elif outcome != layout.PAUSED:
                self._outcome = outcome
                return outcome

    def _begin(self, attempt: Attempt) -> None:
        prepared, state = self._prepared, self._state
        self._instance = _instance(prepared, attempt)
        state.low[:] = prepared.low
        state.rank[:] = attempt.rank
        state.placed[:] = 0
        state.rerank[0] = attempt.rerank
        order = np.lexsort([attempt.rank, prepared.low])
        self._outcome = int(kernel.begin(self._instance, self._switches, state, order))

    def _grow(self) -> None:
        """Double the stacks."""
        state = self._state
        self._state = state._replace(
            lists=np.concatenate([state.lists, np.empty_like(state.lists)]),
            trail=np.concatenate([state.trail, np.empty_like(state.trail)]),
        )


def _state(prepared: Prepared, blame: Ints, section_blame: Ints, failed: Ints) -> layout.State:
    """Memory for a search; the stacks grow on demand."""
    arrays, sections = len(prepared.size), prepared.sections

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    return layout.State(
        low=ints(arrays),
        rank=ints(arrays),
        placed=ints(arrays),
        node=ints(2 * arrays + 2, layout.NODE_COLUMNS),
        lists=ints(16 * arrays + 64),
        trail=ints(8 * arrays + 64, 3),
        register=ints(6),
        total=ints(sections + 2),
        crossing=ints(sections + 2),
        floor=ints(sections + 2),
        following=ints(sections + 2),
        bottom=ints(arrays),
        remaining=ints(arrays),
        changed=ints(arrays),
        key=ints(arrays),
        blame=blame,
        section_blame=section_blame,
        failed=failed,
        rerank=ints(1),
    )


def _instance(prepared: Prepared, attempt: Attempt) -> layout.Instance:
    """The kernel's view, with twins chained by rank."""
    order = np.lexsort([attempt.rank, prepared.twin_class])
    same = prepared.twin_class[order][1:] == prepared.twin_class[order][:-1]
    twin = np.full(len(order), -1, dtype=np.int64)
    twin[order[1:][same]] = order[:-1][same]
    return layout.Instance(
        first=prepared.first,
        last=prepared.last,
        size=prepared.size,
        alignment=prepared.alignment,
        twin=twin,
        gap=prepared.gap,
        gap_low=prepared.gap_low,
        gap_high=prepared.gap_high,
        block=prepared.block,
        block_low=prepared.block_low,
        block_high=prepared.block_high,
        capacity=prepared.capacity,
    )
