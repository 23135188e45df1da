"""Has the states of a graph in one direction of time, and the moves between them.

A state is a bitset of operators that are *done*: run, or, when time runs backwards, undone from the end.
In both directions an operator adds to what is alive an amount that only falls while others are done:

* forwards, what it makes less what it reads and no one else still has to. An input counts as freed
  always (all other consumers precede it), never (one follows it), or once certain others are done;
* backwards, what it reads and no one has brought to life yet, less what it makes.

Running v costs ``live(S) + rise(v)`` forwards, where S is the state before, and ``live(S + v) + rise(v)``
backwards, where S + v is the state after: both times what is alive outside v, plus its rise.

A *move* is an operator that is not lazy together with its lazy ancestors that are not done yet (see
:class:`~olla_solvers.order.search.rules.SearchRules`); by that rule's proof only the operator itself
decides what the move costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from olla_solvers.effort.deadline import check_time
from olla_solvers.graph.bitsets import bits_of
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.problem import Bytes, OperatorIndex

Moves: TypeAlias = dict[OperatorIndex, tuple[Bytes, Bytes]]
"""For each move that may come next its cost beyond live(S), and the bytes it adds to that."""


@dataclass(frozen=True, slots=True)
class _Effect:
    """The bytes that an operator adds to those alive.

    Attributes:
        most_bytes: if nothing lowers it.
        least_bytes: if everything does.
        lowered_by: pairs of a bitset and bytes to subtract if it is done (forwards: all of it;
            backwards: any of it).
    """

    most_bytes: Bytes
    least_bytes: Bytes
    lowered_by: tuple[tuple[int, Bytes], ...]


class Space:
    """States and moves in one direction.

    Attributes:
        flow: the graph.
        backward: True if time runs backwards.
        everything: the last state.
    """

    def __init__(
        self,
        flow: FlowGraph,
        *,
        backward: bool = False,
        lazy: bool = True,
        deadline: float = float("inf"),
    ) -> None:
        """Compile a graph for searching.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        self.flow = flow
        self.backward = backward
        self.everything = (1 << flow.count) - 1
        self._before = flow.descendants if backward else flow.ancestors
        self._next = flow.predecessors if backward else flow.successors
        self._effects: list[_Effect] = []
        for operator in range(flow.count):
            check_time(deadline)
            self._effects.append(self._effect(operator))
        self._lazy = sum(1 << operator for operator in range(flow.count) if lazy and self._is_lazy(operator))
        self._needs = [bits & ~self._lazy for bits in self._before]
        self._brings = [bits & self._lazy for bits in self._before]
        self._opens = self._opened()
        self._touches = self._touched()

    def first_moves(self, done: int) -> Moves:
        """Return all moves from a state, computed anew."""
        return {
            operator: self._step(operator, done)
            for operator in bits_of(self.everything & ~done & ~self._lazy)
            if not self._needs[operator] & ~done
        }

    def run(self, operator: OperatorIndex, done: int, moves: Moves) -> int:
        """Make a move.

        Args:
            operator: the move.
            done: the state.
            moves: those from the state; changed into those from the next one.

        Returns:
            The next state.
        """
        del moves[operator]
        added = self._brings[operator] & ~done | 1 << operator
        done |= added
        touched = 0
        for passed in bits_of(added):
            touched |= self._touches[passed]
        for other in moves:
            if touched >> other & 1:
                moves[other] = self._step(other, done)
        for other in self._opens[operator]:
            if not self._needs[other] & ~done:
                moves[other] = self._step(other, done)
        return done

    def sequence(self, operator: OperatorIndex, done: int) -> tuple[OperatorIndex, ...]:
        """Return a move's operators in the order in which time passes them."""
        ready = tuple(bits_of(self._brings[operator] & ~done))
        return (*(reversed(ready) if self.backward else ready), operator)

    def _step(self, operator: OperatorIndex, done: int) -> tuple[Bytes, Bytes]:
        """Return the move's cost beyond live(S), and the bytes it adds to that."""
        brought = self._brings[operator] & ~done
        before = 0
        if brought:
            # Forwards ascending, backwards descending indices are executable.
            for lazy in reversed(tuple(bits_of(brought))) if self.backward else bits_of(brought):
                before += self._added(lazy, done)
                done |= 1 << lazy
        after = before + self._added(operator, done)
        return (after if self.backward else before) + self.flow.rise_bytes[operator], after

    def _added(self, operator: OperatorIndex, done: int) -> Bytes:
        effect = self._effects[operator]
        added = effect.most_bytes
        if self.backward:
            for bits, size in effect.lowered_by:
                if bits & done:
                    added -= size
        else:
            for bits, size in effect.lowered_by:
                if bits & done == bits:
                    added -= size
        return added

    def _effect(self, operator: OperatorIndex) -> _Effect:
        flow = self.flow
        ancestors, descendants = flow.ancestors[operator], flow.descendants[operator]
        most = -flow.made_bytes[operator] if self.backward else flow.made_bytes[operator]
        lowered: dict[int, Bytes] = {}
        for index in flow.inputs[operator]:
            array = flow.arrays[index]
            others = [reader for reader in array.consumers if reader != operator]
            if any(descendants >> reader & 1 for reader in others):
                continue
            deciding = sum(1 << reader for reader in others if not ancestors >> reader & 1)
            if self.backward:
                most += array.size_bytes
            elif not deciding:
                most -= array.size_bytes
            if deciding:
                lowered[deciding] = lowered.get(deciding, 0) + array.size_bytes
        return _Effect(most, most - sum(lowered.values()), tuple(lowered.items()))

    def _is_lazy(self, operator: OperatorIndex) -> bool:
        """Return True if the rule's condition holds; an operator that nothing follows is never lazy."""
        kept, rise = self._effects[operator].least_bytes, self.flow.rise_bytes
        if kept < 0 or not self._next[operator]:
            return False
        return all(
            rise[operator] <= rise[other] + (self._effects[other].least_bytes if self.backward else kept)
            for other in self._next[operator]
        )

    def _opened(self) -> list[list[OperatorIndex]]:
        """Return for each move those that it may make possible: it is a nearest ancestor, lazy ones aside."""
        before = self.flow.successors if self.backward else self.flow.predecessors
        opens: list[list[OperatorIndex]] = [[] for _ in before]
        for operator in bits_of(self.everything & ~self._lazy):
            met, todo = set(before[operator]), list(before[operator])
            for earlier in todo:
                if not self._lazy >> earlier & 1:
                    opens[earlier].append(operator)
                    continue
                todo += [other for other in before[earlier] if other not in met]
                met.update(before[earlier])
        return opens

    def _touched(self) -> list[int]:
        """Return for each operator the moves whose costs may change when it is done."""
        by_effect = [0] * self.flow.count
        for operator, effect in enumerate(self._effects):
            for bits, _ in effect.lowered_by:
                for deciding in bits_of(bits):
                    by_effect[deciding] |= 1 << operator
        after = self.flow.ancestors if self.backward else self.flow.descendants
        # The moves that a lazy operator may come with are those behind it.
        bring = [
            bits & ~self._lazy if self._lazy >> operator & 1 else 0 for operator, bits in enumerate(after)
        ]
        touches = []
        for operator, moves in enumerate(by_effect):
            touched = moves | bring[operator]
            for lazy in bits_of(moves & self._lazy):
                touched |= bring[lazy]
            touches.append(touched)
        return touches
