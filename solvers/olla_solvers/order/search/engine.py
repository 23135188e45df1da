"""Searches one direction of time for an order within a peak that is raised only when it must be.

States reached within the current peak B wait on a stack; each remembers the smallest cost at which a move
out of it was refused. Once the stack is empty no order stays within B, and none with a peak below the
smallest refused cost exists either: B is raised to that, and the states concerned are taken up again. So
a search that starts at a proven bound has at every moment proven B.

What keeps the proof sound: every state that was reached is expanded at every B, or, by rule ``closure``, has
led to one from which an order stays within B just if one does from the state itself.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from olla_solvers.effort.deadline import DeadlinePassedError, check_time
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


@dataclass(slots=True)
class _State:
    """A set of done operators that was reached within the peak.

    Attributes:
        done: the operators, as a bitset.
        live_bytes: bytes alive after them.
        moves: those that may come next, until the state is expanded.
        parent: the state it was reached from.
        steps: the operators between.
        seen_peak: B when the state was last expanded.
    """

    done: int
    live_bytes: Bytes
    moves: Moves | None
    parent: _State | None = None
    steps: tuple[OperatorIndex, ...] = ()
    seen_peak: Bytes = -1


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
        self._seen = {0}
        self._stack = [_State(0, 0, space.first_moves(0))]
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
                self._expand(self._stack.pop())
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
        if not self._refused or self._refused[0][0] >= self.ceiling_bytes:
            return False
        self.peak_bytes = self._refused[0][0]
        self._take_up_refused()
        return True

    def _take_up_refused(self) -> None:
        while self._refused and self._refused[0][0] <= self.peak_bytes:
            self._stack.append(heapq.heappop(self._refused)[2])

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
                    if self.order is not None:
                        break
        finally:
            # The one with least alive is on top, and comes first.
            self._stack.extend(sorted(children, key=lambda child: child.live_bytes, reverse=True))
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
        return self._reach(state, done, live, following, steps)

    def _reach(
        self, state: _State, done: int, live: Bytes, moves: Moves, steps: Sequence[OperatorIndex]
    ) -> _State | None:
        """Return the state that another one leads to, if it is a new one that is to be searched."""
        if done in self._seen or self.order is not None:
            return None
        self._seen.add(done)
        reached = _State(done, live, moves, state, tuple(steps))
        if done != self._space.everything:
            return reached
        # All operators are done: read the order off the path to here.
        path = reversed([*_path(reached)])
        order = tuple(step for passed in path for step in passed.steps)
        self.order = order[::-1] if self._space.backward else order
        return None

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
        child = self._reach(state, done, live, following, steps)
        if child is not None:
            self._stack.append(child)
        state.moves = None
        return True


def _path(state: _State) -> Iterator[_State]:
    """Yield a state and all its parents."""
    current: _State | None = state
    while current is not None:
        yield current
        current = current.parent
