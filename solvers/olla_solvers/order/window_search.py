"""Improves an order by searching a window around its costliest step anew.

A window of an order runs between two states, and is a graph of its own: what is alive when it begins and
when it ends is given. The exact search looks there for an order below the window's largest cost. If it
finds one, the order's costliest step has moved or fallen; if not, a longer window is tried. More time
never gives a worse order, and it pays on graphs that are far too wide to be proven.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.graph.split import Piece, piece_between
from olla_solvers.order.greedy import best_order
from olla_solvers.order.search import Alternation
from olla_solvers.problem import Bytes, OperatorIndex

SHORTEST = 16
"""Operators of the first window tried around a step."""

GROWTH = 1.6
"""Factor on the length of the next window."""

STATES = 1000
"""States that the search expands in a window at first."""

STATES_GROWTH = 4
"""Factor on their number if no window could be improved."""

MOST_STATES = 1_000_000
"""If these do not help, nothing does."""

MEMORY_BYTES = 256 << 20
"""Bytes that the stored states of a window may take, roughly."""


class WindowSearch:
    """Searches ever longer windows around the costliest step, with ever more states; can be continued.

    Attributes:
        is_done: True if more time is of no use.
    """

    def __init__(self, flow: FlowGraph) -> None:
        """Prepare for a graph."""
        self._flow = flow
        self._states = STATES
        self.is_done = False

    def run(
        self, order: Sequence[OperatorIndex], bound_bytes: Bytes, deadline: float
    ) -> tuple[OperatorIndex, ...]:
        """Improve an order.

        Args:
            order: a known order.
            bound_bytes: stop at an order that needs no more.
            deadline: ``time.monotonic()`` at which to stop.

        Returns:
            An order no worse than the given one.
        """
        best = tuple(order)
        while not self.is_done and time.monotonic() < deadline:
            costs = self._flow.costs(best)
            if max(costs, default=0) <= bound_bytes:
                break
            better = self._improved(best, costs, bound_bytes, deadline)
            if better is not None:
                best = better
            elif time.monotonic() < deadline:
                self._states *= STATES_GROWTH
                self.is_done = self._states > MOST_STATES
        return best

    def _improved(
        self, order: tuple[OperatorIndex, ...], costs: Sequence[Bytes], bound_bytes: Bytes, deadline: float
    ) -> tuple[OperatorIndex, ...] | None:
        """Return the order with some window around its costliest step improved, if one can be."""
        for start, end in _windows(costs.index(max(costs)), self._flow.count):
            if time.monotonic() > deadline:
                return None
            piece = piece_between(self._flow, order, start, end)
            window = self._search(piece, max(costs[start:end]), bound_bytes, deadline)
            if window is not None:
                return (*order[:start], *window, *order[end:])
        return None

    def _search(
        self, piece: Piece, peak_bytes: Bytes, bound_bytes: Bytes, deadline: float
    ) -> tuple[OperatorIndex, ...] | None:
        """Return an order of a window that stays below its peak, if one is found."""
        contracted = contract(piece.flow, deadline)
        smaller = contracted.flow
        if max(contracted.floor_bytes, *smaller.precedence_bytes, 0) >= peak_bytes:
            return None
        known = best_order(smaller, bound_bytes, deadline)
        inner = known.order
        if known.peak_bytes >= peak_bytes:
            bound = max(smaller.precedence_bytes, default=0)
            search = Alternation(
                smaller, inner, bound, most_memory_bytes=MEMORY_BYTES, ceiling_bytes=peak_bytes
            )
            search.run(deadline, self._states)
            inner = search.order
        expanded = contracted.expand(inner)
        return piece.expand(expanded) if piece.flow.peak_bytes(expanded) < peak_bytes else None


def _windows(step: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield windows that hold a step, the shortest first, with the step at various places in them."""
    length = float(SHORTEST)
    while True:
        whole = min(count, round(length))
        met = set()
        for share in (0.5, 0.2, 0.8):
            start = min(max(0, step - round(share * whole)), count - whole)
            if start not in met:
                met.add(start)
                yield start, start + whole
        if whole == count:
            return
        length *= GROWTH
