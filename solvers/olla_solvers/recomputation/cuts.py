"""What to drop at each price of a byte, as minimum cuts: the curve of least seconds against bytes kept.

The price of a byte is in seconds. At a price, the cheapest choice of what is kept and what is made again is a
minimum cut: an array that backward reads is on the source's side; so are the reads of a unit that is made
again. If an array is on that side and its unit is not, the array is kept, and its edge, as wide as its bytes
cost, is cut; if a unit is, its edge to the sink, as wide as its seconds, is. As the price rises only the
first kind of edge gets wider: the flow found at a lower price is still one, and goes on from there. That
makes our own flow in plain Python fast enough (0.07 s for the curve of ResNet-50's step with 40 corners,
1.3 s for one of 10,000 operators), so that no library is needed.

The corners of the curve come from prices at which two neighbours cost the same (Eisner and Severance,
"Mathematical techniques for efficient record segmentation in large shared databases", 1976).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from olla_solvers.graph.minimum_cut import ENDLESS, SINK, SOURCE, Network
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds

PARTS = 1 << 40
"""Parts into which the seconds of a step are divided, since flows are whole numbers."""

FEW = 16
"""Corners that are looked at where any of the curve might do."""


@dataclass(frozen=True)
class Cut:
    """A choice of what is made again.

    Attributes:
        repeated: the units that are.
        kept_bytes: of the arrays that are kept for it.
        seconds: of all repetitions, each unit once.
        flow: the flow that proves it cheapest at its price, to go on from.
        price: of a byte, in parts of the step's seconds per byte.
    """

    repeated: frozenset[int]
    kept_bytes: Bytes
    seconds: Seconds
    flow: list[int]
    price: float


class Cuts:
    """Minimum cuts of one step at rising prices."""

    def __init__(self, instance: Instance, deadline: float = math.inf) -> None:
        """Build the network with free bytes."""
        self._instance = instance
        self._scale = PARTS / max(instance.problem.step_seconds, 1e-30)
        self._network = Network(deadline)
        self._nodes: dict[ArrayIndex, int] = {}
        self._priced: list[tuple[int, ArrayIndex]] = []
        self._needed: list[ArrayIndex] = []
        self._unit_nodes = [self._network.node() for _ in instance.units.arrays]
        self._build()
        self.free = Cut(frozenset(), self._kept_bytes(frozenset()), 0.0, self._network.flow(), 0.0)

    def _build(self) -> None:
        instance, network = self._instance, self._network
        for unit, operators in enumerate(instance.units.operators):
            network.edge(self._unit_nodes[unit], SINK, round(instance.units.seconds[unit] * self._scale))
            for array in {array for operator in operators for array in instance.reads[operator]}:
                if instance.units.of_array[array] != unit and instance.flat.array_bytes[array]:
                    network.edge(self._unit_nodes[unit], self._node(array), ENDLESS)
        for array in needed_late(instance):
            self._needed.append(array)
            network.edge(SOURCE, self._node(array), ENDLESS)
        for array, node in self._nodes.items():
            unit = instance.units.of_array[array]
            if unit >= 0:
                self._priced.append((network.edge(node, self._unit_nodes[unit], 0), array))
            else:
                self._priced.append((network.edge(node, SINK, 0), array))

    def _node(self, array: ArrayIndex) -> int:
        if array not in self._nodes:
            self._nodes[array] = self._network.node()
        return self._nodes[array]

    def at(self, price: float, start: Cut) -> Cut:
        """Return the cheapest choice at a price.

        Args:
            price: parts per byte.
            start: the cut at a lower price.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        network, sizes = self._network, self._instance.flat.array_bytes
        network.resume(start.flow)
        for edge, array in self._priced:
            network.widen(edge, int(price * sizes[array]) - int(start.price * sizes[array]))
        network.maximum_flow()
        reached = network.reached_from_source()
        repeated = frozenset(unit for unit, node in enumerate(self._unit_nodes) if reached[node])
        seconds = sum(self._instance.units.seconds[unit] for unit in sorted(repeated))
        return Cut(repeated, self._kept_bytes(repeated), seconds, network.flow(), price)

    def between(self, low: Cut, high: Cut) -> Cut | None:
        """Return a corner of the curve between two, or None if they are neighbours."""
        if high.kept_bytes >= low.kept_bytes:
            return None
        price = (high.seconds - low.seconds) * self._scale / (low.kept_bytes - high.kept_bytes)
        if not low.price < price < high.price:
            return None
        cut = self.at(price, low)
        is_new = cut.repeated not in (low.repeated, high.repeated)
        cost = cut.seconds * self._scale + price * cut.kept_bytes
        # Rounding of capacities may return a choice on the line between the two.
        below = low.seconds * self._scale + price * low.kept_bytes
        return cut if is_new and cut.kept_bytes < low.kept_bytes and cost < below * (1 - 1e-9) else None

    def dearest(self) -> Cut:
        """Return the choice with the fewest bytes kept that cuts find."""
        smallest = min((size for size in self._instance.flat.array_bytes if size), default=1)
        return self.at(2.0 * PARTS / smallest, self.free)

    def curve(self, most: int) -> list[Cut]:
        """Return corners of the curve, from nothing made again to the fewest bytes kept.

        Args:
            most: how many at most.
        """
        corners = [self.free, self.dearest()]
        todo = [(corners[0], corners[1])]
        while todo and len(corners) < most:
            # The widest gap in bytes first.
            todo.sort(key=lambda pair: pair[0].kept_bytes - pair[1].kept_bytes)
            low, high = todo.pop()
            middle = self.between(low, high)
            if middle is not None:
                corners.append(middle)
                todo += [(low, middle), (middle, high)]
        return sorted(corners, key=lambda cut: cut.seconds)

    def within(self, most_seconds: Seconds) -> list[Cut]:
        """Return corners of the curve within so many seconds; the last keeps fewest bytes of all."""
        found, high = [self.free], self.dearest()
        if high.seconds <= most_seconds:
            return [cut for cut in self.curve(FEW) if cut.seconds <= most_seconds]
        while (middle := self.between(found[-1], high)) is not None:
            if middle.seconds <= most_seconds:
                found.append(middle)
            else:
                high = middle
        return found

    def _kept_bytes(self, repeated: Iterable[int]) -> Bytes:
        """Return the bytes of all arrays that backward or a repetition reads, and nothing makes again."""
        again = frozenset(repeated)
        reads = set(self._needed)
        for unit in again:
            for operator in self._instance.units.operators[unit]:
                reads.update(self._instance.reads[operator])
        return sum(
            self._instance.flat.array_bytes[array]
            for array in reads
            if self._instance.units.of_array[array] not in again
        )


def needed_late(instance: Instance) -> list[ArrayIndex]:
    """Return the arrays of forward in the buffer that an operator of backward reads."""
    is_late = instance.problem.is_late
    needed = {
        array
        for operator, reads in enumerate(instance.reads)
        if is_late[operator]
        for array in reads
        if instance.flat.array_bytes[array]
    }
    arrays = instance.problem.problem.arrays
    producers = {array: arrays[array].producer for array in needed}
    return sorted(array for array, made in producers.items() if made is not None and not is_late[made])
