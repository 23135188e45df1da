"""Orders a graph by every method in turn, from the cheapest to the dearest, until the order is proven.

Greedy rules and the precedence bound come first; then the graph is contracted and split, and each piece
that may still matter gets a short exact search and then, in turns that grow while they gain, min-cut bounds,
projections, more of the search, and searches of windows of its order. The largest of the pieces' smallest
peaks is the graph's, so a bound proven for one piece closes all those whose known order needs no more. When
its patience is over the best order so far is returned, with what has been proven.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from olla_solvers.effort.patience import Patience
from olla_solvers.effort.progress import ProgressLog
from olla_solvers.graph.contract import Contracted, contract, unchanged
from olla_solvers.graph.flow import Candidate, FlowGraph
from olla_solvers.graph.split import Piece, split, undivided
from olla_solvers.order.bounds import MinimumCuts
from olla_solvers.order.greedy import best_order, free_first_orders
from olla_solvers.order.projection import Projection
from olla_solvers.order.search import ALL_RULES, Alternation, SearchRules
from olla_solvers.order.window_search import WindowSearch
from olla_solvers.problem import Bytes, OperatorIndex

SHORT_SEARCH = 1000
"""States of a piece expanded before dearer bounds are tried."""

MOST_CONTRACTED = 50_000
"""Operators above which a graph is not contracted: the bitsets alone would take gigabytes."""

MOST_SEARCHED = 30_000
"""Operators above which a piece is not searched, for the same reason."""

FIRST_TURN = 0.2
"""Seconds of each method's first turn."""

TURN_GROWTH = 1.5
"""Factor on a method's next turn if it lifted the bound or lowered the peak."""

IDLE_GROWTH = 1.15
"""Factor if it did not: a method that needs long for a first result must get there, too."""


@dataclass
class _Part:
    """A piece of the contracted graph with what is known about it.

    Attributes:
        piece: the piece.
        best: its best known order.
        search: its exact search, once started.
        cuts: its min-cut bounds, once started.
        projection: its bounds from key operators, once started.
        windows: the search of its order's windows, once started.
    """

    piece: Piece
    best: Candidate
    search: Alternation | None = None
    cuts: MinimumCuts | None = None
    projection: Projection | None = None
    windows: WindowSearch | None = None

    @property
    def is_exhausted(self) -> bool:
        """True if no method can do more, with the memory that it may take."""
        methods = (self.search, self.cuts, self.projection, self.windows)
        return all(method is None or method.is_done for method in methods)


class Portfolio:
    """One graph on its way to a proven order.

    Attributes:
        best: the best order so far.
        bound_bytes: proven: no order has a smaller peak.
        bound_by: the method that proved the bound.
        parts: the contracted graph's pieces, once there are any.
        seconds: wall-clock time of each method so far.
    """

    def __init__(
        self,
        flow: FlowGraph,
        patience: Patience,
        rules: SearchRules = ALL_RULES,
        log: ProgressLog | None = None,
        known: Candidate | None = None,
        on_gain: Callable[[Portfolio], None] | None = None,
    ) -> None:
        """Start with the greedy orders and the precedence bound.

        Args:
            flow: the graph.
            patience: how long to go on.
            rules: what the exact search may use.
            log: where improvements are noted.
            known: an order to begin from, beside the greedy ones.
            on_gain: called after each improvement of the order or its bound, from ``run`` on.
        """
        self._log = log or ProgressLog(time.monotonic())
        self._flow = flow
        self._patience = patience
        self._deadline = patience.deadline
        self._rules = rules
        self._on_gain = on_gain
        self._contracted: Contracted | None = None
        self.seconds: dict[str, float] = {}
        with self._timed("precedence bound"):
            self.bound_bytes = max(flow.precedence_bytes, default=0)
        self.bound_by = "precedence bound"
        with self._timed("greedy"):
            self.best = best_order(flow, self.bound_bytes, self._deadline, self._log, known)
        self.parts: list[_Part] = []

    @contextlib.contextmanager
    def _timed(self, method: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[method] = self.seconds.get(method, 0.0) + time.monotonic() - start

    @property
    def is_done(self) -> bool:
        """True if the best order is proven, or good enough for the time it took, or the time is over."""
        return not self._patience.lasts(self.best.peak_bytes, self.bound_bytes)

    def run(self) -> None:
        """Run every method until done; the free-first schedules, which take linear time, always."""
        self.run_short()
        if self.best.peak_bytes > self.bound_bytes:
            with self._timed("free first"):
                for candidate in free_first_orders(self._flow):
                    self._offer(candidate)
        self._take_rounds()

    def run_short(self) -> None:
        """Run the cheap methods, which prove most graphs."""
        if self.is_done or self._flow.count > MOST_CONTRACTED:
            return
        with self._timed("contraction"):
            self._cut_up(self._share(0.3))
        self._search(min(self._share(0.5), self._patience.next_look()), SHORT_SEARCH)

    def _offer(self, candidate: Candidate) -> None:
        """Take an order of the whole graph if it is better."""
        if candidate.peak_bytes < self.best.peak_bytes:
            self.best = candidate
            self._note(candidate.rule)

    def _note(self, method: str) -> None:
        self._log.note(self.best.peak_bytes, min(self.bound_bytes, self.best.peak_bytes), method)
        if self._on_gain is not None:
            self._on_gain(self)

    def _take_rounds(self) -> None:
        """Give each method turns: one that gained something gets more time than one that did not."""
        methods = (self._lift_bound, self._project, self._search, self._search_windows)
        seconds = [FIRST_TURN] * len(methods)
        while self._open():
            for turn, method in enumerate(methods):
                if self.is_done:
                    return
                before = (self.bound_bytes, self.best.peak_bytes)
                method(min(self._deadline, time.monotonic() + seconds[turn]))
                gained = before != (self.bound_bytes, self.best.peak_bytes)
                seconds[turn] *= TURN_GROWTH if gained else IDLE_GROWTH
            if all(part.is_exhausted for part in self._open()):
                return

    def _share(self, share: float) -> float:
        """Return a deadline that leaves time for what follows."""
        now = time.monotonic()
        return now + share * max(0.0, self._deadline - now)

    def _cut_up(self, deadline: float) -> None:
        flow = self._flow
        self._contracted = contract(flow, deadline) if self._rules.contract else unchanged(flow)
        smaller = self._contracted.flow
        pieces = split(smaller) if self._rules.split else undivided(smaller)
        for piece in pieces:
            if time.monotonic() < self._deadline:
                self.prove(max(piece.flow.precedence_bytes), "precedence bound")
        for piece in pieces:
            self.parts.append(_Part(piece, best_order(piece.flow, self.bound_bytes, self._deadline)))
        self._join()

    def prove(self, bound_bytes: Bytes, method: str) -> None:
        """Take over a bound if it is better."""
        if bound_bytes > self.bound_bytes:
            self.bound_bytes, self.bound_by = bound_bytes, method
            self._note(method)

    def _open(self) -> list[_Part]:
        """Return the pieces that may need more than the bound, the costliest first."""
        parts = [part for part in self.parts if part.best.peak_bytes > self.bound_bytes]
        return sorted(parts, key=lambda part: -part.best.peak_bytes)

    def _join(self) -> None:
        """Take the pieces' orders together if that is better than the best order."""
        if self._contracted is None:
            return
        inner = [operator for part in self.parts for operator in part.piece.expand(part.best.order)]
        order = self._contracted.expand(inner)
        # Contraction alone may settle the order, and leaves no pieces then.
        costliest = max(self.parts, key=lambda part: part.best.peak_bytes, default=None)
        rule = "greedy:contraction" if costliest is None else costliest.best.rule
        if rule.startswith("greedy"):
            rule = f"{rule}, contracted"
        self._offer(Candidate(order, self._flow.peak_bytes(order), rule))

    def _next_open(self, deadline: float) -> Iterator[_Part]:
        """Yield the open pieces until everything is proven or the time is over."""
        for part in self._open():
            if self.is_done or time.monotonic() > deadline:
                return
            if part.best.peak_bytes > self.bound_bytes:
                yield part

    def _lift_bound(self, deadline: float) -> None:
        for part in self._next_open(deadline) if self._rules.mincut else ():
            if part.cuts is None:
                part.cuts = MinimumCuts(part.piece.flow, part.best.order, self.bound_bytes)
            part.cuts.learn(self.bound_bytes)
            with self._timed("min-cut bound"):
                part.cuts.run(deadline)
            self.prove(part.cuts.bound_bytes, "min-cut bound")

    def _project(self, deadline: float) -> None:
        for part in self._next_open(deadline) if self._rules.projection else ():
            if part.projection is None:
                part.projection = Projection(part.piece.flow, self.bound_bytes)
            part.projection.learn(self.bound_bytes)
            with self._timed("projection bound"):
                part.projection.run(part.best.peak_bytes, deadline)
            self.prove(part.projection.bound_bytes, "projection bound")

    def _search(self, deadline: float, most_states: int | None = None) -> None:
        for part in self._next_open(deadline):
            if part.piece.flow.count > MOST_SEARCHED:
                continue
            if part.search is None:
                part.search = Alternation(part.piece.flow, part.best.order, self.bound_bytes, self._rules)
            search = part.search
            search.learn(part.best.order, self.bound_bytes)
            with self._timed("exact search"):
                search.run(deadline, most_states)
            self.prove(search.bound_bytes, "exact search")
            self._take(part, search.order, "exact search")

    def _search_windows(self, deadline: float) -> None:
        for part in self._next_open(deadline):
            if part.windows is None:
                part.windows = WindowSearch(part.piece.flow)
            with self._timed("window search"):
                order = part.windows.run(part.best.order, self.bound_bytes, deadline)
            self._take(part, order, "window search")

    def _take(self, part: _Part, order: Sequence[OperatorIndex], rule: str) -> None:
        """Take a piece's order if it is better."""
        peak = part.piece.flow.peak_bytes(order)
        if peak < part.best.peak_bytes:
            part.best = Candidate(tuple(order), peak, rule)
            self._join()
