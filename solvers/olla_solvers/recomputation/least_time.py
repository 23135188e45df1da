"""The fastest sequence within a budget, how far it is from what is proven, and the curve over budgets.

Several orders of the step may be given: one with a small peak may keep alive what another makes again
cheaply. The search of each (:mod:`olla_solvers.recomputation.search`) ends when it meets the bound
(:mod:`olla_solvers.recomputation.bounds`), or its effort, counted in walks, is spent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.errors import ProblemError
from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.recomputation.bounds import Bounds, LowerBound
from olla_solvers.recomputation.compiled import is_available
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.pool import Found
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds
from olla_solvers.recomputation.search import Search

MOST_STEPS = 500_000
"""Operators that all walks together may pass: some second of processor time."""

LEAST_WALKS = 120
"""Walks that are made on steps of any length."""

SHARE_OF_STARTS, SHARE_OF_ANNEALING = 0.3, 0.3
"""Shares of the walks that are for starts, and for annealing what was found."""

WORTH_COMPILING = 4.0
"""The effort from which on the annealing is compiled, if numba is installed."""

FASTER = 50
"""Times as many walks are made in annealing then."""

WALKS_A_UNIT = 40
"""Walks that are worth making for each unit that could be dropped."""


@dataclass(frozen=True)
class WithinBudget:
    """The answer for a budget.

    Attributes:
        budget_bytes: of planned arrays and workspaces.
        recomputation: the fastest sequence found within it, or the one with the lowest peak.
        bound: what is proven of any sequence.
        largest: the operator at the sequence's peak.
    """

    budget_bytes: Bytes
    recomputation: Recomputation
    bound: LowerBound
    largest: OperatorIndex

    @property
    def is_met(self) -> bool:
        """True if the sequence is within the budget."""
        return self.recomputation.peak_bytes <= self.budget_bytes

    @property
    def gap_seconds(self) -> Seconds:
        """Seconds of repetitions beyond those that are proven necessary."""
        return (
            max(0.0, self.recomputation.extra_seconds - self.bound.extra_seconds) if self.is_met else math.inf
        )


def least_time(
    problems: RecomputationProblem | Sequence[RecomputationProblem],
    budget_bytes: Bytes,
    *,
    deadline: float = math.inf,
    effort: float = 1.0,
    seed: int = 0,
) -> WithinBudget:
    """Return the fastest sequence within a budget.

    Args:
        problems: the step, in one order or several.
        budget_bytes: of planned arrays and workspaces.
        deadline: ``time.monotonic()`` at which to stop with what there is.
        effort: how many times the usual number of walks to spend. From 4 on, annealing is compiled if numba
            is installed.
        seed: of the random numbers in annealing.

    Returns:
        The fastest sequence that was found; or, if none was within the budget, the one with the lowest peak,
        with a bound that says whether that is proven impossible.

    Raises:
        ProblemError: if order, seconds or makers do not fit a problem.
    """
    return curve(problems, (budget_bytes,), deadline=deadline, effort=effort, seed=seed)[0]


def curve(
    problems: RecomputationProblem | Sequence[RecomputationProblem],
    budgets: Sequence[Bytes],
    *,
    deadline: float = math.inf,
    effort: float = 1.0,
    seed: int = 0,
) -> tuple[WithinBudget, ...]:
    """Return the fastest sequence within each of several budgets.

    A smaller budget's sequence never has a higher peak, and a larger one's never takes longer.

    Args:
        problems: the step, in one order or several.
        budgets: of planned arrays and workspaces, in any sequence.
        deadline: ``time.monotonic()`` at which to stop with what there is.
        effort: how many times the usual number of walks to spend, for each budget. From 4 on,
            annealing is compiled if numba is installed.
        seed: of the random numbers in annealing.

    Returns:
        An answer for each budget, in their sequence.

    Raises:
        ProblemError: if there is no problem, or order, seconds or makers do not fit one.
    """
    given = (problems,) if isinstance(problems, RecomputationProblem) else tuple(problems)
    if not given:
        raise ProblemError("there is no order of a step to plan on")
    planner = _Planner(given, deadline, effort, seed)
    for budget in sorted(set(budgets), reverse=True):
        planner.search(budget)
    return tuple(planner.answer(budget) for budget in budgets)


class _Planner:
    """Searches of all orders, and the bounds, which need no order."""

    def __init__(
        self, problems: Sequence[RecomputationProblem], deadline: float, effort: float, seed: int
    ) -> None:
        instances = [prepare(problem) for problem in problems]
        self._bounds = Bounds(instances[0])
        self._proven: dict[Bytes, LowerBound] = {}
        self._deadline = deadline
        units = max(len(instance.units.arrays) for instance in instances)
        usual = max(LEAST_WALKS, min(MOST_STEPS // max(1, len(problems[0].order)), WALKS_A_UNIT * units))
        self._walks = round(effort * usual) // len(instances)
        self._is_compiled = effort >= WORTH_COMPILING and is_available()
        self._tries = round(SHARE_OF_ANNEALING * self._walks) * (FASTER if self._is_compiled else 1)
        self._seed = seed
        self._searches = [Search(instance, deadline) for instance in instances]
        self._is_started = False

    def search(self, budget_bytes: Bytes) -> None:
        """Search all orders, as long as what is found is slower than what is proven."""
        bound = self._bound(budget_bytes)
        if bound.is_impossible and self._is_started:
            return
        try:
            if not self._is_started and self._fastest(budget_bytes)[1] is None:
                self._is_started = True
                for search in self._searches:
                    search.find_starts(round(SHARE_OF_STARTS * self._walks))
            for search in self._searches:
                found = self._fastest(budget_bytes)[1]
                if found is not None and found.extra_seconds <= bound.extra_seconds:
                    return
                search.meet(budget_bytes, round((1 - SHARE_OF_STARTS - SHARE_OF_ANNEALING) * self._walks))
                found = search.pool.fastest(budget_bytes)
                if found is None or found.extra_seconds > bound.extra_seconds:
                    search.improve(budget_bytes, self._tries, self._seed, self._is_compiled)
        except DeadlinePassedError:
            return

    def answer(self, budget_bytes: Bytes) -> WithinBudget:
        """Return the fastest of all searches, or the lowest."""
        search, found = self._fastest(budget_bytes)
        if found is None:
            search = min(self._searches, key=lambda each: each.pool.lowest.peak_bytes)
            found = search.pool.lowest
        evaluator = search.evaluator
        recomputation = evaluator.recomputation(found.states)
        resident = evaluator.trace.timestep_bytes[: len(recomputation.executions)]
        at = max(range(len(resident)), key=resident.__getitem__, default=0)
        largest = recomputation.executions[at].operator if resident else 0
        return WithinBudget(budget_bytes, recomputation, self._bound(budget_bytes), largest)

    def _bound(self, budget_bytes: Bytes) -> LowerBound:
        if budget_bytes not in self._proven:
            self._proven[budget_bytes] = self._bounds.lower_bound(budget_bytes, self._deadline)
        return self._proven[budget_bytes]

    def _fastest(self, budget_bytes: Bytes) -> tuple[Search, Found | None]:
        best: tuple[Search, Found | None] = (self._searches[0], None)
        for search in self._searches:
            found = search.pool.fastest(budget_bytes)
            if found is not None and (best[1] is None or found.extra_seconds < best[1].extra_seconds):
                best = (search, found)
        return best
