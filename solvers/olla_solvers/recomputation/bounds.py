"""What no sequence can beat: the least seconds of repetitions within a budget, in any order.

Let b be an operator. When it first runs, its ancestors have run, and neither it nor its descendants have.
What these read of the ancestors' results is there at that moment, or is made again later, by operators that
have all run before: repetitions. So the cheapest choice of what is kept, in the room that b's own results
and workspace leave, and what is made again, is a bound, whatever the order and the number of repetitions.

The room enters with a price for its bytes. At each price a minimum cut
(:mod:`olla_solvers.recomputation.cuts`) less what the room costs is a bound, and the best price is where the
cut keeps as much as there is room for. If not even the choice that keeps least has room, there is no sequence
at all. The certificate is the operator and the price; who doubts it computes one minimum cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.recomputation.cuts import Choice, Cut, Cuts
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.problem import ArrayIndex, RecomputationProblem, Seconds

MOMENTS = 24
"""Operators of backward at which the bound is looked at."""

LARGEST = 4
"""And so many of those that need most by themselves."""

REFINED = 3
"""Of these, with prices of their own."""

MOST_PRICES = 12
"""Prices tried for one operator."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """A proof of what no sequence can beat.

    Attributes:
        budget_bytes: for which it holds.
        extra_seconds: of repetitions, at least; infinite if no sequence is within the budget.
        operator: at whose first run it is counted; None if nothing is to be proven.
        price: of a byte, in seconds.
        least_bytes: that any sequence needs, as far as was proven.
    """

    budget_bytes: Bytes
    extra_seconds: Seconds
    operator: OperatorIndex | None
    price: float
    least_bytes: Bytes

    @property
    def is_impossible(self) -> bool:
        """True if no sequence is within the budget."""
        return math.isinf(self.extra_seconds)


def lower_bound(
    problem: RecomputationProblem, budget_bytes: Bytes, *, deadline: float = math.inf
) -> LowerBound:
    """Return the least seconds of repetitions that any sequence within a budget needs.

    Args:
        problem: the step; its order does not matter.
        budget_bytes: of planned arrays and workspaces.
        deadline: ``time.monotonic()`` at which to stop with what is proven.

    Raises:
        ProblemError: if order, seconds or makers do not fit the problem.
    """
    return Bounds(prepare(problem)).lower_bound(budget_bytes, deadline)


class Bounds:
    """Bounds of one step, for any budgets."""

    def __init__(self, instance: Instance) -> None:
        """Count what each operator needs by itself."""
        self._instance = instance
        self._own = [self._own_bytes(operator) for operator in range(len(instance.reads))]
        sizes = instance.flat.array_bytes
        reads = [sum(sizes[array] for array in read) for read in instance.reads]
        self._alone = [own + read for own, read in zip(self._own, reads, strict=True)]
        self._networks: dict[OperatorIndex, tuple[Cuts, Cut]] = {}

    def lower_bound(self, budget_bytes: Bytes, deadline: float = math.inf) -> LowerBound:
        """Return the best bound found for a budget; see :func:`lower_bound`."""
        largest = max(range(len(self._alone)), key=self._alone.__getitem__, default=None)
        least = 0 if largest is None else self._alone[largest]
        if largest is not None and least > budget_bytes:
            return LowerBound(budget_bytes, math.inf, largest, math.inf, least)
        best = LowerBound(budget_bytes, 0.0, None, 0.0, least)
        try:
            return self._best(best, deadline)
        except DeadlinePassedError:
            return best

    def _best(self, best: LowerBound, deadline: float) -> LowerBound:
        """Look at many operators with the price that is best for one, and closely at the best of these."""
        budget_bytes = best.budget_bytes
        looked_at: list[tuple[Seconds, OperatorIndex]] = []
        for operator in self._moments():
            cuts, dearest = self._network(operator, deadline)
            room = budget_bytes - self._own[operator]
            least = dearest.kept_bytes + self._own[operator]
            if least > budget_bytes:
                return LowerBound(budget_bytes, math.inf, operator, math.inf, least)
            best = replace(best, least_bytes=max(least, best.least_bytes))
            if not looked_at:
                best = max(best, self._at_best_price(operator, best, deadline), key=_seconds)
            if cuts.free.kept_bytes > room and best.price > 0:
                cut = cuts.at(best.price * cuts.parts, cuts.free)
                looked_at.append((_value(cuts, cut, room), operator))
            elif cuts.free.kept_bytes > room:
                looked_at.append((0.0, operator))
        for _, operator in sorted(looked_at, reverse=True)[:REFINED]:
            best = max(best, self._at_best_price(operator, best, deadline), key=_seconds)
        return best

    def _at_best_price(self, operator: OperatorIndex, before: LowerBound, deadline: float) -> LowerBound:
        """Return the bound of one operator at the price that makes it largest."""
        cuts, high = self._network(operator, deadline)
        room = before.budget_bytes - self._own[operator]
        low = cuts.free
        best_seconds, best_price = 0.0, 0.0
        if low.kept_bytes <= room:
            return before
        for _ in range(MOST_PRICES):
            if low.kept_bytes <= high.kept_bytes:
                break
            price = (high.seconds - low.seconds) * cuts.parts / (low.kept_bytes - high.kept_bytes)
            if not low.price <= price < high.price:
                break
            cut = cuts.at(price, low)
            seconds = _value(cuts, cut, room)
            if seconds > best_seconds:
                best_seconds, best_price = seconds, price / cuts.parts
            if cut.repeated in (low.repeated, high.repeated):
                break
            low, high = (cut, high) if cut.kept_bytes > room else (low, cut)
        return LowerBound(before.budget_bytes, best_seconds, operator, best_price, before.least_bytes)

    def _moments(self) -> list[OperatorIndex]:
        """Return operators of backward all over it, that at which most is needed first."""
        instance = self._instance
        late = [operator for operator in instance.problem.order if instance.problem.is_late[operator]]
        largest = sorted(late, key=lambda operator: -self._alone[operator])[:LARGEST]
        chosen = dict.fromkeys((*late[:: max(1, len(late) // MOMENTS)], *largest))
        bytes_of = {}
        for operator in chosen:
            needed, sizes = self._needed(operator)
            bytes_of[operator] = sum(sizes[array] for array in needed) + self._own[operator]
        return sorted(chosen, key=lambda operator: -bytes_of[operator])

    def _own_bytes(self, operator: OperatorIndex) -> Bytes:
        """Return the bytes of an operator's results and workspace that lie beside what it reads."""
        flat, instance = self._instance.flat, self._instance
        taken: dict[int, Bytes] = {}
        for read, made in instance.problem.takes_over:
            if made in instance.makes[operator] and flat.array_bytes[read]:
                taken[made] = flat.array_bytes[made]
        made_bytes: Bytes = sum(flat.array_bytes[array] for array in instance.makes[operator])
        workspace_bytes: Bytes = flat.workspace_bytes[operator]
        return made_bytes + workspace_bytes - sum(taken.values())

    def _needed(self, operator: OperatorIndex) -> tuple[list[ArrayIndex], list[Bytes]]:
        """Return the ancestors' arrays that an operator or a descendant reads, and the bytes of any."""
        instance, problem = self._instance, self._instance.problem.problem
        before = _reachable(operator, problem.predecessors)
        after = _reachable(operator, problem.successors)
        needed, sizes = [], [0] * len(problem.arrays)
        for index, array in enumerate(problem.arrays):
            producer = array.producer
            if producer is None or producer == operator or not before[producer]:
                continue
            sizes[index] = instance.flat.array_bytes[index]
            # A reader of forward may read what a later maker has not written over yet.
            is_final = len(instance.problem.makers[index]) < 2
            if sizes[index] and any(
                after[reader] and (is_final or instance.problem.is_late[reader]) for reader in array.consumers
            ):
                needed.append(index)
        return needed, sizes

    def _network(self, operator: OperatorIndex, deadline: float) -> tuple[Cuts, Cut]:
        """Return the cuts at an operator's first run, and the one that keeps least."""
        if operator not in self._networks:
            instance, problem = self._instance, self._instance.problem
            needed, sizes = self._needed(operator)
            before = _reachable(operator, problem.problem.predecessors)
            there = set(instance.reads[operator])
            choice = Choice(
                needed,
                [() if array in there else makers for array, makers in enumerate(problem.makers)],
                instance.reads,
                # What has not run by then costs nothing: it runs for the first time.
                [
                    taken if ran else 0.0
                    for ran, taken in zip(before, problem.repetition_seconds, strict=True)
                ],
                sizes,
                problem.step_seconds,
            )
            cuts = Cuts(choice, deadline)
            self._networks[operator] = (cuts, cuts.dearest())
        return self._networks[operator]


def _reachable(start: OperatorIndex, neighbours: Sequence[Sequence[OperatorIndex]]) -> list[bool]:
    """Return for each operator if it is reached; the start is."""
    reached = [False] * len(neighbours)
    reached[start] = True
    todo = [start]
    for operator in todo:
        for other in neighbours[operator]:
            if not reached[other]:
                reached[other] = True
                todo.append(other)
    return reached


def _value(cuts: Cuts, cut: Cut, room: Bytes) -> Seconds:
    """Return the bound that a cut proves, safe against the rounding of capacities."""
    return (cut.least - cut.price * room - 1) / cuts.parts


def _seconds(bound: LowerBound) -> Seconds:
    return bound.extra_seconds
