"""Searches one direction of time for an order within a peak that is raised only when it must be.

States reached within the current peak B wait on a stack; each remembers the smallest cost at which a move
out of it was refused. Once the stack is empty no order stays within B, and none with a peak below the
smallest refused cost exists either: B is raised to that, and the states concerned are taken up again. So
a search that starts at a proven bound has at every moment proven B.

The states form a graph whose edges lead to larger sets of done operators. What keeps the proof sound is
one invariant: if some order from a live state stays within B, one from some live state that it leads to
does. A replaced state leads only to its replacement (rule ``commit``), and a state that nothing live
leads to any more is forgotten, so that it counts as new when met again.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Iterator

from olla_solvers.deadline import DeadlinePassedError, check_time
from olla_solvers.order.search.rules import SearchRules
from olla_solvers.order.search.space import Moves, Space
from olla_solvers.problem import Bytes, OperatorIndex

STATE_BYTES = 1200
"""Rough memory of one stored state beside its bitsets."""


class Outcome(enum.Enum):
    """The reason why a search stopped."""

    FOUND = "an order within the peak was found"
    EXHAUSTED = "no order has a peak below the ceiling"
    BUDGET = "the given number of states has been expanded"
    DEADLINE = "the time is over"
    MEMORY = "no more states may be stored"


class _State:
    """A set of done operators that was reached within the peak."""

    __slots__ = (
        "children",
        "done",
        "live_bytes",
        "moves",
        "parent",
        "references",
        "replaced",
        "seen_peak",
        "steps",
    )

    def __init__(self, done: int, live_bytes: Bytes, moves: Moves | None) -> None:
        self.done = done
        self.live_bytes = live_bytes
        self.moves = moves
        self.parent: _State | None = None
        self.steps: tuple[OperatorIndex, ...] = ()
        self.children: list[_State] = []
        self.references = 0
        self.replaced = False
        self.seen_peak: Bytes = -1

    @property
    def is_live(self) -> bool:
        return self.references > 0 and not self.replaced


class Search:
    """A search that can be continued.

    Attributes:
        peak_bytes: B, the peak that orders may have; no order has a smaller one if that held at the start.
        ceiling_bytes: orders with this peak or more are of no use; may be lowered at any time.
        expanded: states expanded so far.
        order: the order found, first to last in real time, or None.
    """

    def __init__(
        self, space: Space, rules: SearchRules, peak_bytes: Bytes, ceiling_bytes: Bytes, most_bytes: int
    ) -> None:
        """Prepare a search.

        Args:
            space: the graph in one direction.
            rules: which rules to use.
            peak_bytes: the peak to start with.
            ceiling_bytes: a known peak; only smaller ones are searched for.
            most_bytes: memory that stored states may take, roughly.
        """
        self._space = space
        self._rules = rules
        self.peak_bytes = peak_bytes
        self.ceiling_bytes = ceiling_bytes
        self.expanded = 0
        self.order: tuple[OperatorIndex, ...] | None = None
        self._most_states = max(1000, most_bytes // (STATE_BYTES + space.flow.count // 4))
        self._deadline = float("inf")
        root = _State(0, 0, space.first_moves(0))
        root.references = 1
        self._seen = {0: root}
        self._stack = [root]
        self._refused: list[tuple[Bytes, int, _State]] = []
        self._counter = itertools.count()

    def run(self, budget: int, deadline: float) -> Outcome:
        """Search on.

        Args:
            budget: states to expand at most.
            deadline: ``time.monotonic()`` at which to stop.

        Returns:
            The reason why the search stopped. It can be continued after ``BUDGET`` and ``DEADLINE``.
        """
        self._deadline = deadline
        last = self.expanded + budget
        try:
            while self.order is None:
                if not self._stack and not self._raise_peak():
                    return Outcome.EXHAUSTED
                if self.peak_bytes >= self.ceiling_bytes:
                    return Outcome.EXHAUSTED
                if self.expanded >= last:
                    return Outcome.BUDGET
                if len(self._seen) > self._most_states:
                    return Outcome.MEMORY
                # Before the state is taken off the stack: one that is lost would make for a false proof.
                check_time(deadline)
                state = self._stack.pop()
                if state.is_live:
                    self._expand(state)
        except DeadlinePassedError:
            return Outcome.DEADLINE
        return Outcome.FOUND

    def raise_to(self, peak_bytes: Bytes) -> None:
        """Allow a larger peak, one that was proven elsewhere to be needed."""
        if peak_bytes > self.peak_bytes:
            self.peak_bytes = peak_bytes
            self._take_up_refused()

    def _raise_peak(self) -> bool:
        """Raise B to the smallest refused cost. Return False if nothing below the ceiling was refused."""
        while self._refused and not self._refused[0][2].is_live:
            heapq.heappop(self._refused)
        if not self._refused or self._refused[0][0] >= self.ceiling_bytes:
            return False
        self.peak_bytes = self._refused[0][0]
        self._take_up_refused()
        return True

    def _take_up_refused(self) -> None:
        while self._refused and self._refused[0][0] <= self.peak_bytes:
            state = heapq.heappop(self._refused)[2]
            if state.is_live:
                self._stack.append(state)

    def _expand(self, state: _State) -> None:
        """Make every move from a state that is within B and was not when the state was last expanded."""
        self.expanded += 1
        try:
            self._follow_moves(state)
        except DeadlinePassedError:
            self._stack.append(state)
            raise

    def _follow_moves(self, state: _State) -> None:
        moves = self._space.first_moves(state.done) if state.moves is None else state.moves
        if self._rules.closure and self._replace_by_closure(state, moves):
            return
        refused: Bytes | None = None
        children: list[_State] = []
        try:
            for operator, (beyond, _) in sorted(moves.items(), key=lambda item: (item[1][1], item[0])):
                cost = state.live_bytes + beyond
                if cost > self.peak_bytes:
                    refused = cost if refused is None else min(refused, cost)
                elif cost > state.seen_peak:
                    check_time(self._deadline)
                    child = self._child(state, moves, operator)
                    if child is not None:
                        children.append(child)
                    if state.replaced or self.order is not None:
                        break
        finally:
            # The one with least alive is on top, and comes first.
            self._stack.extend(sorted(children, key=lambda child: child.live_bytes, reverse=True))
        if state.replaced:
            return
        state.seen_peak, state.moves = self.peak_bytes, None
        if refused is not None and refused < self.ceiling_bytes:
            heapq.heappush(self._refused, (refused, next(self._counter), state))

    def _child(self, state: _State, moves: Moves, operator: OperatorIndex) -> _State | None:
        """Return the state after a move and what follows from it by the rules, if it is a new one."""
        following = dict(moves)
        _, added = moves[operator]
        steps = list(self._space.sequence(operator, state.done))
        done = self._space.run(operator, state.done, following)
        live = state.live_bytes + added
        if self._rules.closure:
            done, live = self._close(done, live, following, steps)
        child, new = self._lead(state, done, live, following, tuple(steps))
        return self._commit(child) if new else None

    def _lead(
        self,
        state: _State,
        done: int,
        live: Bytes,
        moves: Moves | None,
        steps: tuple[OperatorIndex, ...],
    ) -> tuple[_State, bool]:
        """Note that a state leads to another; return the other, and True if it is to be searched."""
        known = self._seen.get(done)
        target = known or _State(done, live, moves)
        if known is None:
            target.parent, target.steps = state, steps
            self._seen[done] = target
        if all(target is not child for child in state.children):
            state.children.append(target)
            target.references += 1
        if done == self._space.everything and self.order is None:
            self._finish(state, steps)
        return target, known is None and self.order is None

    def _close(self, done: int, live: Bytes, moves: Moves, steps: list[OperatorIndex]) -> tuple[int, Bytes]:
        """Make moves that fit and leave no more alive, until there is none: rule ``closure``."""
        while True:
            check_time(self._deadline)
            room = self.peak_bytes - live
            chosen = next((v for v, (beyond, added) in moves.items() if added <= 0 and beyond <= room), None)
            if chosen is None:
                return done, live
            live += moves[chosen][1]
            steps += self._space.sequence(chosen, done)
            done = self._space.run(chosen, done, moves)

    def _replace_by_closure(self, state: _State, moves: Moves) -> bool:
        """Apply rule ``closure`` to a state itself: B may have been raised since it was reached."""
        room = self.peak_bytes - state.live_bytes
        if not any(added <= 0 and beyond <= room for beyond, added in moves.values()):
            return False
        following, steps = dict(moves), list[OperatorIndex]()
        done, live = self._close(state.done, state.live_bytes, following, steps)
        child, new = self._lead(state, done, live, following, tuple(steps))
        self._replace(state, child)
        smaller = self._commit(child) if new else None
        if smaller is not None:
            self._stack.append(smaller)
        return True

    def _commit(self, state: _State) -> _State | None:
        """Replace ancestors by a new state, or by a smaller one between: rule ``commit``.

        Returns:
            The state to search on from, or None if that is known already.
        """
        ancestor = state.parent if self._rules.commit else None
        while ancestor is not None:
            if not ancestor.is_live:
                ancestor = ancestor.parent
                continue
            if ancestor.live_bytes < state.live_bytes:
                break
            try:
                least, smallest = self._space.smallest_between(
                    ancestor.done, state.done, ancestor.live_bytes, state.live_bytes, self._deadline
                )
            except DeadlinePassedError:
                self._stack.append(state)
                raise
            steps = self._steps_between(ancestor, state)
            if least < state.live_bytes:
                kept = tuple(step for step in steps if smallest >> step & 1)
                state, new = self._lead(ancestor, smallest, least, None, kept)
                self._replace(ancestor, state)
                if not new:
                    return None
            else:
                self._lead(ancestor, state.done, state.live_bytes, None, steps)
                state.parent, state.steps = ancestor, steps
                self._replace(ancestor, state)
            ancestor = ancestor.parent
        return state

    def _replace(self, state: _State, target: _State) -> None:
        """Let a state lead to one of its children alone."""
        others = [child for child in state.children if child is not target]
        state.children = [target]
        state.replaced, state.moves = True, None
        for child in others:
            self._release(child)

    def _release(self, state: _State) -> None:
        """Drop an edge to a state; forget it, and what only it leads to, if that was the last one."""
        todo = [state]
        while todo:
            reached = todo.pop()
            reached.references -= 1
            if reached.references == 0:
                del self._seen[reached.done]
                todo += reached.children
                reached.children, reached.moves = [], None

    def _steps_between(self, ancestor: _State, state: _State) -> tuple[OperatorIndex, ...]:
        """Return the operators on the path from an ancestor."""
        return tuple(step for passed in reversed([*_path(state, ancestor)]) for step in passed.steps)

    def _finish(self, state: _State, steps: tuple[OperatorIndex, ...]) -> None:
        """Read the order off the path to here: all operators are done."""
        order = tuple(step for passed in reversed([*_path(state, None)]) for step in passed.steps) + steps
        self.order = order[::-1] if self._space.backward else order


def _path(state: _State, end: _State | None) -> Iterator[_State]:
    """Yield a state and its parents up to, but without, the end."""
    current: _State | None = state
    while current is not None and current is not end:
        yield current
        current = current.parent
