"""What no sequence can beat: the least seconds of repetitions within a budget, in any order.

Let b be an operator. When it first runs, its ancestors have run, and neither it nor its descendants have.
What these read of others' results is there at that moment, or is made later: by operators that have all run
before, if they are ancestors, and otherwise free of cost. That again needs what it reads. So the cheapest
choice of what is kept, in the room that b's own results and workspace leave, and what is made later is a
bound, whatever the order and the number of repetitions.

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
from olla_solvers.recomputation.problem import RecomputationProblem, Seconds

LEAST_MOMENTS, MOMENTS = 8, 64
"""Operators of backward at which the bound is looked at: in the largest steps, and in small ones."""

MOST_STEPS = 60_000
"""Operators of the networks that are looked at, together."""

LARGEST = 4
"""Of these, those that need most by themselves."""

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
        moments: the operators of the integer program that proves it; empty if a minimum cut does. See
            :mod:`olla_solvers.recomputation.residency_program`.
    """

    budget_bytes: Bytes
    extra_seconds: Seconds
    operator: OperatorIndex | None
    price: float
    least_bytes: Bytes
    moments: tuple[OperatorIndex, ...] = ()

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
        self._own = [own_bytes(instance, operator) for operator in range(len(instance.reads))]
        sizes = instance.flat.array_bytes
        reads = [sum(sizes[array] for array in read) for read in instance.reads]
        self._alone = [own + read for own, read in zip(self._own, reads, strict=True)]
        self._networks: dict[OperatorIndex, Cuts] = {}
        self._least: dict[OperatorIndex, Cut] = {}

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
        """Look at operators all over backward, then closely around the one that proves most.

        To look at an operator is one cut, at the price that is best for another one.
        """
        instance = self._instance
        late = [operator for operator in instance.problem.order if instance.problem.phases[operator]]
        most = max(LEAST_MOMENTS, min(MOMENTS, MOST_STEPS // max(1, len(instance.problem.order))))
        step = max(1, 2 * len(late) // most)
        largest = sorted(range(len(late)), key=lambda place: -self._alone[late[place]])[:LARGEST]
        todo = list(dict.fromkeys((*largest, *range(0, len(late), step))))
        values: dict[int, Seconds] = {}
        worst = todo[0] if todo else 0
        while todo:
            for place in (*largest, worst) if not values else (worst,):
                best = self._least_bytes(late[place], best, deadline)
                if best.is_impossible:
                    return best
            for place in todo:
                if not best.price:
                    best = self._at_best_price(late[place], best, deadline)
                values[place] = self._at_price(late[place], best, deadline)
            worst = max(values, key=values.__getitem__)
            if values[worst] > 0:
                best = self._at_best_price(late[worst], best, deadline)
            step //= 2
            todo = [
                place
                for place in (worst - step, worst + step)
                if step and len(values) < most and 0 <= place < len(late) and place not in values
            ]
        return best

    def _least_bytes(self, operator: OperatorIndex, best: LowerBound, deadline: float) -> LowerBound:
        """Return the bound with what an operator proves of the bytes that are needed at all."""
        least = self._dearest(operator, deadline).kept_bytes + self._own[operator]
        if least > best.budget_bytes:
            return LowerBound(best.budget_bytes, math.inf, operator, math.inf, least)
        return replace(best, least_bytes=max(least, best.least_bytes))

    def _at_price(self, operator: OperatorIndex, best: LowerBound, deadline: float) -> Seconds:
        cuts = self._network(operator, deadline)
        room = self._room(operator, best.budget_bytes)
        if cuts.free.kept_bytes <= room or not best.price:
            return 0.0
        return _value(cuts, cuts.at(best.price * cuts.parts, cuts.free), room)

    def _at_best_price(self, operator: OperatorIndex, before: LowerBound, deadline: float) -> LowerBound:
        """Return the bound of one operator at its best price, if that is more than before."""
        cuts = self._network(operator, deadline)
        room = self._room(operator, before.budget_bytes)
        low = cuts.free
        best_seconds, best_price = 0.0, 0.0
        if low.kept_bytes <= room:
            return before
        high = self._dearest(operator, deadline)
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
        if best_seconds <= before.extra_seconds:
            return before
        return replace(before, extra_seconds=best_seconds, operator=operator, price=best_price)

    def _room(self, operator: OperatorIndex, budget_bytes: Bytes) -> Bytes:
        """Return the bytes that there are for others' results when an operator first runs."""
        return budget_bytes - self._own[operator]

    def _network(self, operator: OperatorIndex, deadline: float) -> Cuts:
        """Return the cuts at an operator's first run."""
        if operator not in self._networks:
            self._networks[operator] = Cuts(self._choice(operator), deadline)
        return self._networks[operator]

    def _dearest(self, operator: OperatorIndex, deadline: float) -> Cut:
        """Return what must be there at an operator's first run at least."""
        if operator not in self._least:
            self._least[operator] = self._network(operator, deadline).dearest()
        return self._least[operator]

    def _choice(self, operator: OperatorIndex) -> Choice:
        """Return what an operator and its descendants need of others' results, and how these come to be."""
        instance, problem = self._instance, self._instance.problem
        before = reachable(operator, problem.problem.predecessors)
        after = reachable(operator, problem.problem.successors)
        there = set(instance.reads[operator])
        stays = instance.stays_at(instance.problem.order.index(operator)) if instance.problem.stays else set()
        needed, sizes = [], [0] * len(problem.makers)
        makers: list[Sequence[OperatorIndex]] = list(problem.makers)
        for index, array in enumerate(problem.problem.arrays):
            producer = array.producer
            if producer is None or after[producer]:
                continue
            sizes[index] = 0 if index in stays else instance.flat.array_bytes[index]
            if index in there:
                makers[index] = ()
            elif not before[producer]:
                makers[index] = problem.makers[index] or (producer,)
            # A reader of the same phase may read what a later maker has not written over yet.
            is_final = len(problem.makers[index]) < 2
            if sizes[index] and any(
                after[reader] and (is_final or problem.phases[reader] > problem.phases[producer])
                for reader in array.consumers
            ):
                needed.append(index)
        # What has not run by then runs for the first time.
        seconds = [
            taken if ran else 0.0 for ran, taken in zip(before, problem.repetition_seconds, strict=True)
        ]
        return Choice(needed, makers, instance.reads, seconds, sizes, problem.step_seconds)


def own_bytes(instance: Instance, operator: OperatorIndex) -> Bytes:
    """Return the bytes of an operator's results and workspace, and of what is lent.

    They lie beside what of others' results it reads.

    Args:
        instance: the step.
        operator: which.
    """
    flat = instance.flat
    pairs = range(flat.taken_starts[operator], flat.taken_starts[operator + 1])
    taken: dict[int, Bytes] = {
        flat.taken_by[pair]: flat.array_bytes[flat.taken_by[pair]]
        for pair in pairs
        if flat.array_bytes[flat.taken_from[pair]]
    }
    made_bytes: Bytes = sum(flat.array_bytes[array] for array in instance.makes[operator])
    workspace_bytes: Bytes = flat.workspace_bytes[operator]
    return made_bytes + workspace_bytes + instance.lent_bytes[operator] - sum(taken.values())


def reachable(start: OperatorIndex, neighbours: Sequence[Sequence[OperatorIndex]]) -> list[bool]:
    """Return for each operator if it is reached; the start is.

    Args:
        start: an operator.
        neighbours: of each.
    """
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
