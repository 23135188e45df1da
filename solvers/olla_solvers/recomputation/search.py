"""Searches the fastest states of one order within budgets, and keeps all that is best at some budget.

Starts are the corners of the curve of minimum cuts, and segments of each
(:mod:`olla_solvers.recomputation.grid`), for a budget also what is cheapest to make again
(:mod:`olla_solvers.recomputation.low_cost`), and what was found in other orders. For a budget, the fastest
start within it is moved as far as the budget allows towards faster ones that are beyond it, in windows of the
units in which they differ; and those beyond it are brought within it greedily. What is not needed is kept
again. What is found for one budget serves as a start for the next. Where effort is left, it is annealed
(:mod:`olla_solvers.recomputation.anneal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from olla_solvers.effort.deadline import check_time
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.anneal import anneal
from olla_solvers.recomputation.compiled import compiled_anneal
from olla_solvers.recomputation.cuts import Cut, Cuts, choice_of_units
from olla_solvers.recomputation.evaluate import Evaluator, States, plain_states, states_of
from olla_solvers.recomputation.greedy import Greedy, prune
from olla_solvers.recomputation.grid import SEGMENTS, segmented
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.low_cost import rates, without
from olla_solvers.recomputation.pool import Evaluated, Pool
from olla_solvers.recomputation.walk import ALWAYS, MOST_MOMENTS, OFTEN, ONCE

MOST_CORNERS = 49
"""Corners of the curve that are starts."""

NEIGHBOURS = 3
"""Faster states beyond a budget from which it is approached."""

FIRST_TURNS, TURNS, MOST_TURNS = 2, 8, 24
"""Anneals, each from the best of the one before, between which the clock is looked at: as many if they gain
nothing from the fastest states, usually, and as long as they gain."""

FIRST_SHARE = 64
"""The share of the units, as a reciprocal, from which on more and more of the cheapest are dropped."""

ROUNDS = 4
"""Times that a budget is approached, as long as that gains."""


class Search:
    """Finds states of one order.

    Attributes:
        evaluator: of the order.
        pool: the best found so far.
    """

    def __init__(self, instance: Instance, deadline: float) -> None:
        """Start with the order without repetitions.

        Args:
            instance: the order.
            deadline: to stop at.
        """
        self.evaluator = Evaluator(instance, deadline)
        self._is_compiled = False
        self.pool = Pool()
        self._instance = instance
        self._deadline = deadline
        self._greedy = Greedy(self.evaluator)
        self.plain = self.try_states(plain_states(instance))

    def compile(self) -> None:
        """Have numba compile walks and annealing from now on."""
        self.evaluator.compile()
        self._is_compiled = True

    def try_states(self, states: States) -> Evaluated:
        """Evaluate states, and keep them if they are best at some budget.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        evaluated = Evaluated(states, self.evaluator.evaluate(states))
        self.pool.add(evaluated)
        return evaluated

    def has_units_of(self, other: Search) -> bool:
        """Return True if the same may run again in another order."""
        return self._instance.units.arrays == other._instance.units.arrays

    def try_states_of(self, other: Search, states: States) -> None:
        """Evaluate states that were found for another order of the same units, if they can be stated here.

        Args:
            other: the search that found them.
            states: of each unit.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        translated = self.evaluator.states_from(other.evaluator, states)
        if translated is not None:
            self.try_states(translated)

    def corners(self) -> list[Cut]:
        """Return corners of the curve of minimum cuts, which are the same for all orders of equal units."""
        return Cuts(choice_of_units(self._instance), self._deadline).curve(MOST_CORNERS)

    def find_starts(self, curve: Sequence[Cut], most_walks: int) -> None:
        """Fill the pool with corners of the curve and segments.

        Args:
            curve: its corners.
            most_walks: after which no more are tried.
        """
        last_walk = self.evaluator.walks + most_walks
        corners, units = [], len(self.plain.states)
        for corner in curve:
            states = states_of(self._instance, corner.repeated, self.plain.states)
            corners.append(states)
            self.try_states(states)
        often = ([OFTEN] * units, [ALWAYS] * units) if self._is_compiled else ()
        last_walk += len(often) * len(SEGMENTS)
        for dropped in ([ONCE] * units, *often, *_spread(corners)):
            for states in segmented(self._instance, dropped):
                if self.evaluator.walks >= last_walk:
                    return
                self.try_states(states)

    def drop_cheapest(self, budget_bytes: Bytes) -> None:
        """Find how many of the units that take fewest seconds per byte must be dropped.

        Args:
            budget_bytes: the peak that may not be passed.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        price, plain = rates(self._instance), self.plain.states
        units = sorted(range(len(price)), key=price.__getitem__)

        def is_within(count: int) -> bool:
            tried = self.try_states(without(self._instance, units[:count], plain))
            return tried.evaluation.is_valid and tried.peak_bytes <= budget_bytes

        if not units:
            return
        # Where very many are dropped, what is made again together needs more memory, so the first is sought.
        low, high = 0, max(1, len(units) // FIRST_SHARE)
        while not is_within(high):
            if high == len(units):
                return
            low, high = high, min(len(units), high + max(1, high // 4))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_within(middle) else (middle, high)

    def meet(self, budget_bytes: Bytes, most_walks: int) -> Evaluated | None:
        """Search the fastest states within a budget; None if none are found.

        Args:
            budget_bytes: the peak that may not be passed.
            most_walks: after which to stop.
        """
        last_walk = self.evaluator.walks + most_walks
        best: Evaluated | None = None
        for _ in range(ROUNDS):
            before = best
            for beyond in self.pool.beyond(budget_bytes, NEIGHBOURS):
                within = self.pool.fastest(budget_bytes)
                if within is not None:
                    self._approach(within, beyond, budget_bytes, last_walk)
                self._reach(beyond, budget_bytes, last_walk)
            within = self.pool.fastest(budget_bytes)
            if within is not None:
                self.pool.add(prune(self.evaluator, within, budget_bytes, last_walk - self.evaluator.walks))
            best = self.pool.fastest(budget_bytes)
            if best is before or self.evaluator.walks >= last_walk:
                break
        return best

    def improve(self, budget_bytes: Bytes, tries: int, seed: int) -> None:
        """Anneal the fastest states within a budget, or the lowest if there are none.

        Args:
            budget_bytes: the peak that may not be passed.
            tries: walks to make.
            seed: of the random numbers.
        """
        fastest = self.pool.fastest(budget_bytes)
        start = fastest or self.pool.lowest
        step_seconds = self._instance.problem.step_seconds
        states: Any = list(start.states)
        best: Any = list(start.states)
        if not states:
            return
        if self._is_compiled:
            # States with very many moments are not numbers that compiled code has.
            if len(self.evaluator.flat.moments) > MOST_MOMENTS:
                return
            states, best = np.array(states), np.array(best)
            run, (flat, trace) = compiled_anneal(), self.evaluator.for_compiled_code()
        else:
            run, flat, trace = anneal, self.evaluator.flat, self.evaluator.trace
        last = TURNS if fastest is None else FIRST_TURNS
        for turn in range(MOST_TURNS):
            check_time(self._deadline)
            if run(flat, states, best, trace, budget_bytes, step_seconds, tries // TURNS, seed + turn) >= 0:
                self.try_states([int(state) for state in best])
                states[:] = best[:]
            before, fastest = fastest, self.pool.fastest(budget_bytes)
            if fastest is not before:
                last = max(TURNS, turn + 1 + FIRST_TURNS)
            if turn + 1 == last:
                return

    def _reach(self, beyond: Evaluated, budget_bytes: Bytes, last_walk: int) -> None:
        """Bring states within a budget greedily."""
        within = self.pool.fastest(budget_bytes)
        limit = float("inf") if within is None else within.extra_seconds
        left = last_walk - self.evaluator.walks
        evaluated = self._greedy.meet(beyond, budget_bytes, 1.1 * limit, left)
        if evaluated.peak_bytes <= budget_bytes:
            evaluated = prune(self.evaluator, evaluated, budget_bytes, last_walk - self.evaluator.walks)
        self.pool.add(evaluated)

    def _approach(self, within: Evaluated, beyond: Evaluated, budget_bytes: Bytes, last_walk: int) -> None:
        """Change states within a budget to others' in windows of units, as far as the budget allows."""
        differing = [
            unit
            for unit, (here, there) in enumerate(zip(within.states, beyond.states, strict=True))
            if here != there
        ]
        for ordered in (differing, differing[::-1]):
            self._keep_prefix(within, beyond, ordered, budget_bytes)
        best = self.pool.fastest(budget_bytes) or within
        width = len(differing) // 2
        while width and self.evaluator.walks < last_walk:
            for start in range(0, len(differing), width):
                if self.evaluator.walks >= last_walk:
                    return
                best = self._changed(best, beyond, differing[start : start + width], budget_bytes)
            width //= 2

    def _keep_prefix(
        self, within: Evaluated, beyond: Evaluated, ordered: Sequence[int], budget_bytes: Bytes
    ) -> None:
        """Bisect how many units can be changed from the beginning."""
        low, high = 0, len(ordered)
        while high - low > 1:
            middle = (low + high) // 2
            changed = self._changed(within, beyond, ordered[:middle], budget_bytes)
            low, high = (middle, high) if changed is not within else (low, middle)

    def _changed(
        self, evaluated: Evaluated, other: Evaluated, units: Sequence[int], budget_bytes: Bytes
    ) -> Evaluated:
        """Return states with some units as in others if that is within the budget and faster."""
        states = list(evaluated.states)
        for unit in units:
            states[unit] = other.states[unit]
        if states == evaluated.states:
            return evaluated
        changed = self.try_states(states)
        is_better = (
            changed.evaluation.is_valid
            and changed.peak_bytes <= budget_bytes
            and changed.extra_seconds < evaluated.extra_seconds
        )
        return changed if is_better else evaluated


def _spread(corners: Sequence[States]) -> list[States]:
    """Return the corners, those first that halve what lies between the ones before."""
    result: list[States] = []
    seen: set[int] = set()
    step = 1 << max(0, len(corners) - 1).bit_length()
    while step:
        for at in range(0, len(corners), step):
            if at not in seen:
                seen.add(at)
                result.append(corners[len(corners) - 1 - at])
        step //= 2
    return result
