"""Keeps the state of list scheduling: what can run now, what it would cost, and what it would free.

One state serves both directions. Forwards, the operators run from the first; an array is freed when the
last of its consumers has run, so ``net`` of the one that remains falls. Backwards, operators are taken
from the end: undoing a consumer brings an array to life, which costs nothing for its other consumers any
more, and undoing its producer removes it. In both, ``net`` only ever falls while others run.
"""

from __future__ import annotations

from olla_solvers.graph.flow import FlowGraph
from olla_solvers.problem import Bytes, OperatorIndex


class Frontier:
    """Operators done so far in one direction, and the cost of each that may follow.

    Attributes:
        live_bytes: bytes alive between the operators done and the others.
        net_bytes: for each operator what running it now would add to ``live_bytes``.
        ready: operators that could run at the start.
    """

    def __init__(self, flow: FlowGraph, *, backwards: bool = False) -> None:
        """Start with nothing done."""
        self._flow = flow
        self._backwards = backwards
        self._done = [False] * flow.count
        self._open = [0 if backwards else len(array.consumers) for array in flow.arrays]
        before, self._after = flow.predecessors, flow.successors
        if backwards:
            before, self._after = self._after, before
        self._missing = [len(direct) for direct in before]
        self.live_bytes: Bytes = 0
        self.ready = [operator for operator, missing in enumerate(self._missing) if missing == 0]
        self.net_bytes = [-made if backwards else made for made in flow.made_bytes]
        for operator, inputs in enumerate(flow.inputs):
            for index in inputs:
                array = flow.arrays[index]
                if backwards:
                    self.net_bytes[operator] += array.size_bytes
                elif len(array.consumers) == 1:
                    self.net_bytes[operator] -= array.size_bytes

    def cost(self, operator: OperatorIndex) -> Bytes:
        """Return the bytes needed while this operator runs next."""
        rise = self._flow.rise_bytes[operator]
        return self.live_bytes + (rise + self.net_bytes[operator] if self._backwards else rise)

    def run(self, operator: OperatorIndex) -> tuple[list[OperatorIndex], list[OperatorIndex]]:
        """Run a ready operator.

        Returns:
            The operators it made ready, and those, ready or not, whose ``net_bytes`` fell.
        """
        self.live_bytes += self.net_bytes[operator]
        fell = self._raise_inputs(operator) if self._backwards else self._lower_inputs(operator)
        opened = []
        for successor in self._after[operator]:
            self._missing[successor] -= 1
            if self._missing[successor] == 0:
                opened.append(successor)
        return opened, fell

    def _lower_inputs(self, operator: OperatorIndex) -> list[OperatorIndex]:
        """Count this consumer off; an array with one consumer left is freed by that one."""
        self._done[operator] = True
        fell = []
        for index in self._flow.inputs[operator]:
            self._open[index] -= 1
            if self._open[index] == 1:
                array = self._flow.arrays[index]
                last = next(reader for reader in array.consumers if not self._done[reader])
                self.net_bytes[last] -= array.size_bytes
                fell.append(last)
        return fell

    def _raise_inputs(self, operator: OperatorIndex) -> list[OperatorIndex]:
        """Bring the inputs to life for all other consumers, if this is the first one that is undone."""
        fell = []
        for index in self._flow.inputs[operator]:
            if self._open[index] == 0:
                array = self._flow.arrays[index]
                others = [reader for reader in array.consumers if reader != operator]
                for other in others:
                    self.net_bytes[other] -= array.size_bytes
                fell.extend(others)
            self._open[index] += 1
        return fell
