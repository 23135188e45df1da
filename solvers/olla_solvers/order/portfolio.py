"""Orders a graph by every method in turn, from the cheapest to the dearest, until the order is proven.

Greedy rules and the precedence bound come first; then the graph is contracted and split, and each piece
that may still matter gets a short exact search, min-cut bounds and dearer heuristics, and then, in turns
that grow where they gain, more cuts, projections, more of the search, and searches of stretches of its
order. The integer program is tried last, where it is small enough to help. The largest of the pieces'
smallest peaks is the graph's, so a bound proven for one piece closes all those whose known order needs no
more. Whatever has been found by the deadline is returned, with what has been proven.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.graph.contract import Contracted, contract, unchanged
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.graph.split import Piece, split, undivided
from olla_solvers.ilp import backends
from olla_solvers.ilp.order_pieces import Refined, refine
from olla_solvers.ilp.order_program import variables_needed
from olla_solvers.order.bounds import MinimumCuts
from olla_solvers.order.greedy import Found, best_order, best_piece_order
from olla_solvers.order.projection import Projection
from olla_solvers.order.search import ALL_RULES, Alternation, SearchRules
from olla_solvers.order.window_search import StretchSearch
from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.progress import ProgressLog

MOST_PROGRAM_VARIABLES = 20_000
"""Larger integer programs are not tried where no solver was named."""

SHORT_SEARCH = 1000
"""States of a piece expanded before dearer bounds and heuristics are tried."""

MOST_CONTRACTED = 50_000
"""Operators above which a graph is not contracted: the bitsets alone would take gigabytes."""

MOST_SEARCHED = 30_000
"""Operators above which a piece is not searched, for the same reason."""

FIRST_TURN = 0.5
"""Seconds of each method's first turn."""

TURN_GROWTH = 1.5
"""How much longer a method's next turn is where it lifted the bound or lowered the peak."""

IDLE_GROWTH = 1.15
"""How much longer it is where it did not: what needs long for a first result must get there, too."""


@dataclass
class _Part:
    """A piece of the contracted graph with what is known about it.

    Attributes:
        piece: the piece.
        found: its best known order.
        search: its exact search, once started.
        cuts: its min-cut bounds, once started.
        projection: its bounds from key operators, once started.
        stretches: the search of its order's stretches, once started.
    """

    piece: Piece
    found: Found
    search: Alternation | None = None
    cuts: MinimumCuts | None = None
    projection: Projection | None = None
    stretches: StretchSearch | None = None


class Portfolio:
    """One graph on its way to a proven order.

    Attributes:
        best: the best order so far.
        bound_bytes: proven: no order has a smaller peak.
        bound_by: the method that proved the bound.
        parts: the contracted graph's pieces, once there are any.
        refined: if the integer program ran: the solver, what it did, and the best order before.
        seconds: wall-clock time of each method so far.
    """

    def __init__(
        self,
        flow: FlowGraph,
        deadline: float,
        rules: SearchRules = ALL_RULES,
        log: ProgressLog | None = None,
    ) -> None:
        """Start with the greedy orders and the precedence bound.

        Args:
            flow: the graph.
            deadline: on the monotonic clock.
            rules: what the exact search may use.
            log: where improvements are noted.
        """
        self._log = log or ProgressLog(time.monotonic())
        self._flow = flow
        self._deadline = deadline
        self._rules = rules
        self._contracted: Contracted | None = None
        self.seconds: dict[str, float] = {}
        with self._timed("precedence bound"):
            self.bound_bytes = max(flow.precedence_bytes, default=0)
        self.bound_by = "precedence bound"
        with self._timed("greedy"):
            self.best = best_order(flow, self.bound_bytes, deadline, self._log)
        self.parts: list[_Part] = []
        self.refined: tuple[str, Refined, Found] | None = None

    @contextlib.contextmanager
    def _timed(self, method: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[method] = self.seconds.get(method, 0.0) + time.monotonic() - start

    @property
    def is_done(self) -> bool:
        """Whether the best order is proven, or the time is over."""
        return self.best.peak_bytes <= self.bound_bytes or time.monotonic() > self._deadline

    def offer(self, order: Sequence[OperatorIndex], rule: str) -> None:
        """Take an order of the whole graph that was found elsewhere, if it is better."""
        peak = self._flow.peak_bytes(order)
        if peak < self.best.peak_bytes:
            self.best = Found(tuple(order), peak, rule)
            self._note(rule)

    def _note(self, method: str) -> None:
        self._log.note(self.best.peak_bytes, min(self.bound_bytes, self.best.peak_bytes), method)

    def run_short(self) -> None:
        """The cheap methods, which prove most graphs."""
        if self.is_done or self._flow.count > MOST_CONTRACTED:
            return
        with self._timed("contraction"):
            self._cut_up(self._share(0.3))
        self._search(self._share(0.2), SHORT_SEARCH)

    def run_long(self, *, program: bool) -> None:
        """The dearer methods, until done.

        Args:
            program: whether the integer program may be tried.
        """
        self._lift_bound(self._share(0.15))
        self._improve(self._share(0.15))
        solvers = self._solvers() if program else ()
        self._take_rounds(self._share(0.6) if solvers else self._deadline)
        for solver in solvers:
            if self._solve(solver):
                break

    def _take_rounds(self, deadline: float) -> None:
        """Bounds, search and stretches in turns: what gained something gets more time than what did not."""
        methods = (self._lift_bound, self._project, self._search, self._search_stretches)
        seconds = [FIRST_TURN] * len(methods)
        while self._open() and not self.is_done and time.monotonic() < deadline:
            for at, method in enumerate(methods):
                before = (self.bound_bytes, self.best.peak_bytes)
                method(min(deadline, time.monotonic() + seconds[at]))
                gained = before != (self.bound_bytes, self.best.peak_bytes)
                seconds[at] *= TURN_GROWTH if gained else IDLE_GROWTH
            if all(self._is_exhausted(part) for part in self._open()):
                return

    def _is_exhausted(self, part: _Part) -> bool:
        """Whether no method can do more for a piece, with the memory that it may take."""
        started = [
            each for each in (part.search, part.cuts, part.projection, part.stretches) if each is not None
        ]
        return all(each.is_done for each in started)

    def _share(self, part: float) -> float:
        """A deadline that leaves time for what follows."""
        now = time.monotonic()
        return now + part * max(0.0, self._deadline - now)

    def _cut_up(self, deadline: float) -> None:
        flow = self._flow
        self._contracted = contract(flow, deadline) if self._rules.contract else unchanged(flow)
        smaller = self._contracted.flow
        pieces = split(smaller) if self._rules.split else undivided(smaller)
        for piece in pieces:
            if time.monotonic() < self._deadline:
                self._prove(max(piece.flow.precedence_bytes), "precedence bound")
        for piece in pieces:
            self.parts.append(_Part(piece, best_order(piece.flow, self.bound_bytes, self._deadline)))
        self._join()

    def _prove(self, bound_bytes: Bytes, method: str) -> None:
        if bound_bytes > self.bound_bytes:
            self.bound_bytes, self.bound_by = bound_bytes, method
            self._note(method)

    def _open(self) -> list[_Part]:
        """Pieces that may need more than the bound, the costliest first."""
        found = [part for part in self.parts if part.found.peak_bytes > self.bound_bytes]
        return sorted(found, key=lambda part: -part.found.peak_bytes)

    def _join(self) -> None:
        """Take the pieces' orders together where that is better than the best order."""
        if self._contracted is None:
            return
        inner = [each for part in self.parts for each in part.piece.expand(part.found.order)]
        order = self._contracted.expand(inner)
        peak = self._flow.peak_bytes(order)
        if peak < self.best.peak_bytes:
            # Contraction alone may settle the order, and leaves no pieces then.
            costliest = max(self.parts, key=lambda part: part.found.peak_bytes, default=None)
            rule = "greedy:contraction" if costliest is None else costliest.found.rule
            self.best = Found(order, peak, f"{rule}, contracted" if rule.startswith("greedy") else rule)
            self._note(self.best.rule)

    def _improve(self, deadline: float) -> None:
        """Dearer heuristics."""
        for part in self._open():
            if self.is_done or time.monotonic() > deadline:
                return
            with self._timed("lookahead and exchange"):
                found = best_piece_order(part.piece.flow, self.bound_bytes, deadline)
            self._take(part, found.order, found.rule)

    def _lift_bound(self, deadline: float) -> None:
        for part in self._open() if self._rules.mincut else ():
            if self.is_done or time.monotonic() > deadline:
                return
            if part.cuts is None:
                part.cuts = MinimumCuts(part.piece.flow, part.found.order, self.bound_bytes)
            part.cuts.learn(self.bound_bytes)
            with self._timed("min-cut bound"):
                part.cuts.run(deadline)
            self._prove(part.cuts.bound_bytes, "min-cut bound")

    def _project(self, deadline: float) -> None:
        for part in self._open() if self._rules.projection else ():
            if self.is_done or time.monotonic() > deadline:
                return
            if part.projection is None:
                part.projection = Projection(part.piece.flow, self.bound_bytes)
            part.projection.learn(self.bound_bytes)
            with self._timed("projection bound"):
                part.projection.run(part.found.peak_bytes, deadline)
            self._prove(part.projection.bound_bytes, "projection bound")

    def _search(self, deadline: float, most_states: int | None = None) -> None:
        for part in self._open():
            if self.is_done or time.monotonic() > deadline:
                return
            if part.found.peak_bytes <= self.bound_bytes or part.piece.flow.count > MOST_SEARCHED:
                continue
            if part.search is None:
                part.search = Alternation(part.piece.flow, part.found.order, self.bound_bytes, self._rules)
            search = part.search
            search.learn(part.found.order, self.bound_bytes)
            with self._timed("exact search"):
                search.run(deadline, most_states)
            self._prove(search.bound_bytes, "exact search")
            self._take(part, search.order, "exact search")

    def _search_stretches(self, deadline: float) -> None:
        for part in self._open():
            if self.is_done or time.monotonic() > deadline:
                return
            if part.stretches is None:
                part.stretches = StretchSearch(part.piece.flow)
            with self._timed("search of stretches"):
                order = part.stretches.run(part.found.order, self.bound_bytes, deadline)
            self._take(part, order, "search of stretches")

    def _take(self, part: _Part, order: Sequence[OperatorIndex], rule: str) -> None:
        """Take a piece's order where it is better."""
        peak = part.piece.flow.peak_bytes(order)
        if peak < part.found.peak_bytes:
            part.found = Found(tuple(order), peak, rule)
            self._join()

    def _solvers(self) -> tuple[str, ...]:
        """Solvers that may take the program of every piece that is open."""
        sizes = [variables_needed(part.piece.flow) for part in self._open()]
        if self.is_done or not sizes or max(sizes) > MOST_PROGRAM_VARIABLES:
            return ()
        size = max(sizes)
        return tuple(each for each in backends.available_solvers() if backends.may_take(each, size, size))

    def _solve(self, solver: str) -> bool:
        """Run the integer program on what is open. False where the solver does not take it."""
        parts = self._open()
        if self.is_done or not parts:
            return True
        try:
            with self._timed("integer program"):
                refined = refine(
                    [part.piece for part in parts], [part.found for part in parts], solver, self._deadline
                )
        except SolverUnavailableError:
            return False
        self.refined = (solver, refined, self.best)
        for part, order in zip(parts, refined.orders, strict=True):
            self._take(part, order, f"ilp:{solver}")
        self._prove(refined.bound_bytes or 0, f"ilp:{solver}")
        return True
