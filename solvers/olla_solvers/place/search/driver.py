"""Runs the compiled search: attempt after attempt, looking at the clock in between.

numba compiles the search when it first runs, once in some ten seconds, and finds it in its cache on disk in
every later process. It is loaded then, and not before.
"""

from __future__ import annotations

import enum
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.place.search import layout
from olla_solvers.place.search.instance import Prepared, prepare
from olla_solvers.place.search.portfolio import Attempt, attempts
from olla_solvers.place.search.rules import SearchRules
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset

SLICE = 5_000_000
"""Steps of work between two looks at the clock, about 10 ms."""


class SearchStatus(enum.StrEnum):
    """How a search ended."""

    FOUND = "found"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        status: how it ended; ``INFEASIBLE`` is a proof.
        offsets: one for each span, or None where none was found.
        nodes: placements tried.
        attempts: orders tried.
        order: the one that ended the search.
        seconds: wall-clock time.
    """

    status: SearchStatus
    offsets: tuple[Offset, ...] | None
    nodes: int
    attempts: int
    order: str
    seconds: float


def is_available() -> bool:
    """Whether numba, which compiles the search, is installed."""
    return importlib.util.find_spec("numba") is not None


def search(
    spans: Sequence[Span],
    capacity_bytes: Bytes,
    *,
    time_limit: float | None = None,
    node_limit: int | None = None,
    rules: SearchRules | None = None,
    seed: int = 0,
) -> SearchResult:
    """Place spans within a capacity, or prove that it cannot be done.

    Without a time limit the result depends on the arguments alone.

    Args:
        spans: rectangles; those with an offset keep it.
        capacity_bytes: room for all.
        time_limit: seconds; None for no limit.
        node_limit: most placements to try; None for no limit.
        rules: which pruning rules to use; None for all.
        seed: of the random orders.

    Returns:
        Offsets, a proof that there are none, or neither in the time.

    Raises:
        SolverUnavailableError: when numba is not installed.
    """
    if not is_available():
        raise SolverUnavailableError("the exact search needs numba; install it with: pip install numba")
    start = time.monotonic()
    rules = SearchRules() if rules is None else rules
    prepared = prepare(spans, capacity_bytes, rules)
    nodes, tried = 0, 0

    def result(status: SearchStatus, offsets: tuple[Offset, ...] | None, name: str) -> SearchResult:
        return SearchResult(status, offsets, nodes, tried, name, time.monotonic() - start)

    if prepared.contradictory:
        return result(SearchStatus.INFEASIBLE, None, "given offsets")
    if len(prepared.size) == 0:
        return result(SearchStatus.FOUND, _offsets(spans, prepared, prepared.low), "no choice")
    run = _Run(prepared, rules)
    deadline = None if time_limit is None else start + time_limit
    for attempt in attempts(prepared, run.state.blame, run.state.section_blame, seed):
        budget = attempt.nodes if node_limit is None else min(attempt.nodes, node_limit - nodes)
        outcome = run.attempt(attempt, budget, deadline)
        nodes += run.nodes
        tried += 1
        if outcome == layout.FOUND:
            return result(SearchStatus.FOUND, _offsets(spans, prepared, run.state.low), attempt.name)
        if outcome == layout.EXHAUSTED:
            return result(SearchStatus.INFEASIBLE, None, attempt.name)
        late = deadline is not None and time.monotonic() >= deadline
        if late or (node_limit is not None and nodes >= node_limit):
            break
    return result(SearchStatus.TIME_LIMIT, None, "none")


class _Run:
    """The compiled search with its memory, which attempts share."""

    def __init__(self, prepared: Prepared, rules: SearchRules) -> None:
        from olla_solvers.place.search import kernel

        self._kernel = kernel
        self._prepared = prepared
        self._switches = rules.switches()
        self.state = _state(len(prepared.size), prepared.sections)

    @property
    def nodes(self) -> int:
        """Placements that the last attempt tried."""
        return int(self.state.register[layout.NODES])

    def attempt(self, attempt: Attempt, nodes: int, deadline: float | None) -> int:
        """Try one order; returns the kernel's outcome, ``PAUSED`` when a limit was met."""
        prepared, state = self._prepared, self.state
        instance = _instance(prepared, attempt)
        state.low[:] = prepared.low
        state.rank[:] = attempt.rank
        state.placed[:] = 0
        state.rerank[0] = attempt.rerank
        order = np.lexsort([attempt.rank, prepared.low])
        outcome = int(self._kernel.begin(instance, self._switches, state, order))
        while outcome in (layout.PAUSED, layout.NEEDS_ROOM):
            if outcome == layout.NEEDS_ROOM:
                self._grow()
            elif self.nodes >= nodes or (deadline is not None and time.monotonic() >= deadline):
                return layout.PAUSED
            work = int(self.state.register[layout.WORK]) + SLICE
            outcome = int(self._kernel.run(instance, self._switches, self.state, nodes, work))
        return outcome

    def _grow(self) -> None:
        """Double the stacks."""
        state = self.state
        self.state = state._replace(
            lists=np.concatenate([state.lists, np.empty_like(state.lists)]),
            trail=np.concatenate([state.trail, np.empty_like(state.trail)]),
        )


def _state(arrays: int, sections: int) -> layout.State:
    """Memory for a search; the stacks grow on demand."""

    def ints(*shape: int) -> layout.Ints:
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
        blame=ints(arrays),
        section_blame=ints(sections + 2),
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


def _offsets(spans: Sequence[Span], prepared: Prepared, low: layout.Ints) -> tuple[Offset, ...]:
    """Offsets in bytes, for all spans."""
    offsets = [0 if span.offset is None else span.offset for span in spans]
    for index, units in zip(prepared.spans, low, strict=True):
        offsets[index] = int(units) * prepared.unit_bytes
    return tuple(offsets)
