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
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from olla_solvers.graph.minimum_cut import SINK, SOURCE, Network
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds

PARTS = 1 << 40
"""Parts into which the seconds of a step are divided, since flows are whole numbers."""

ENDLESS = 1 << 120
"""More parts than all bytes cost at any price."""

FEW = 16
"""Corners that are looked at where any of the curve might do."""


@dataclass(frozen=True)
class Choice:
    """What may be kept or made again for something.

    Attributes:
        needed: arrays that must be there in one way or the other.
        makers: for each array what has to run to make it again; empty if it must be kept.
        reads: for each maker the arrays that must be there for it.
        seconds: of each maker.
        sizes: bytes of each array.
        step_seconds: that the prices are fine enough for.
    """

    needed: Sequence[ArrayIndex]
    makers: Sequence[Sequence[int]]
    reads: Sequence[Collection[ArrayIndex]]
    seconds: Sequence[Seconds]
    sizes: Sequence[Bytes]
    step_seconds: Seconds


@dataclass(frozen=True)
class Cut:
    """A cheapest choice.

    Attributes:
        repeated: the makers that run.
        kept_bytes: of the arrays that are kept.
        seconds: of all that runs.
        price: of a byte, in parts of the step's seconds.
        least: flow that proves that no choice costs less at this price, in parts.
        flow: to go on from.
    """

    repeated: frozenset[int]
    kept_bytes: Bytes
    seconds: Seconds
    price: float
    least: int
    flow: list[int]


class Cuts:
    """Minimum cuts at rising prices.

    Attributes:
        free: the cut at price 0: everything is kept.
    """

    def __init__(self, choice: Choice, deadline: float = math.inf) -> None:
        """Build the network with free bytes."""
        self._choice = choice
        self._scale = PARTS / max(choice.step_seconds, 1e-30)
        self._network = Network(deadline)
        self._arrays: dict[ArrayIndex, int] = {}
        self._makers: dict[int, int] = {}
        self._priced: list[tuple[int, Bytes]] = []
        self._build()
        self.free = Cut(frozenset(), self._kept_bytes(frozenset()), 0.0, 0.0, 0, self._network.flow())

    @property
    def edges(self) -> int:
        """How many capacities were rounded, each by less than one part."""
        return len(self._priced) + len(self._makers)

    @property
    def parts(self) -> float:
        """Parts of a second."""
        return self._scale

    def _build(self) -> None:
        choice, network = self._choice, self._network
        todo: list[ArrayIndex] = []
        for array in choice.needed:
            if choice.sizes[array]:
                network.edge(SOURCE, self._array(array, todo), ENDLESS)
        for array in todo:
            node, makers = self._arrays[array], choice.makers[array]
            to = self._maker(makers[0], todo) if len(makers) == 1 else network.node() if makers else SINK
            self._priced.append((network.edge(node, to, 0), choice.sizes[array]))
            if len(makers) > 1:
                for maker in makers:
                    network.edge(to, self._maker(maker, todo), ENDLESS)

    def _array(self, array: ArrayIndex, todo: list[ArrayIndex]) -> int:
        if array not in self._arrays:
            self._arrays[array] = self._network.node()
            todo.append(array)
        return self._arrays[array]

    def _maker(self, maker: int, todo: list[ArrayIndex]) -> int:
        if maker not in self._makers:
            node = self._makers[maker] = self._network.node()
            self._network.edge(node, SINK, int(self._choice.seconds[maker] * self._scale))
            for array in self._choice.reads[maker]:
                if self._choice.sizes[array] and maker not in self._choice.makers[array]:
                    self._network.edge(node, self._array(array, todo), ENDLESS)
        return self._makers[maker]

    def at(self, price: float, start: Cut) -> Cut:
        """Return the cheapest choice at a price.

        Args:
            price: parts per byte.
            start: the cut at a lower price.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        network = self._network
        network.resume(start.flow)
        for edge, size in self._priced:
            network.widen(edge, int(price * size) - int(start.price * size))
        least = start.least + network.maximum_flow()
        reached = network.reached_from_source()
        repeated = frozenset(maker for maker, node in self._makers.items() if reached[node])
        seconds = sum(self._choice.seconds[maker] for maker in sorted(repeated))
        return Cut(repeated, self._kept_bytes(repeated), seconds, price, least, network.flow())

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
        """Return the choice with the fewest bytes kept."""
        # One byte costs more than everything together.
        return self.at(2.0 * PARTS, self.free)

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
        cuts, high = [self.free], self.dearest()
        if high.seconds <= most_seconds:
            return [cut for cut in self.curve(FEW) if cut.seconds <= most_seconds]
        while (middle := self.between(cuts[-1], high)) is not None:
            if middle.seconds <= most_seconds:
                cuts.append(middle)
            else:
                high = middle
        return cuts

    def _kept_bytes(self, repeated: frozenset[int]) -> Bytes:
        """Return the bytes of all arrays that must be there, and that nothing makes again."""
        there = set(self._choice.needed)
        for maker in repeated:
            there.update(
                array for array in self._choice.reads[maker] if maker not in self._choice.makers[array]
            )
        return sum(
            self._choice.sizes[array]
            for array in there
            if not self._choice.makers[array] or not repeated.issuperset(self._choice.makers[array])
        )


def choice_of_units(instance: Instance) -> Choice:
    """Return the choice of units for the arrays that an operator of a later phase reads."""
    units, phases = instance.units, instance.problem.phases
    order = enumerate(instance.problem.order)
    late = next((position for position, operator in order if phases[operator]), 0)
    stays = instance.stays_at(late)
    return Choice(
        needed=_needed_late(instance),
        makers=[() if unit < 0 else (unit,) for unit in units.of_array],
        reads=[
            {array for operator in operators for array in instance.reads[operator]}
            for operators in units.operators
        ],
        seconds=units.seconds,
        sizes=[0 if array in stays else size for array, size in enumerate(instance.flat.array_bytes)],
        step_seconds=instance.problem.step_seconds,
    )


def _needed_late(instance: Instance) -> list[ArrayIndex]:
    """Return the arrays that an operator of a later phase reads."""
    phases, arrays = instance.problem.phases, instance.problem.problem.arrays
    needed = {(array, phases[operator]) for operator, reads in enumerate(instance.reads) for array in reads}
    producers = ((array, phase, arrays[array].producer) for array, phase in needed)
    return sorted({array for array, phase, made in producers if made is not None and phases[made] < phase})
