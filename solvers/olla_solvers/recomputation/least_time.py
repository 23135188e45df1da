"""The fastest sequence within a budget, how far it is from what is proven, and the curve over budgets.

Several orders of the step may be given: one with a small peak may keep alive what another makes again
cheaply. A bound comes first (:mod:`olla_solvers.recomputation.bounds`). If an integer program solver is
installed, it is asked for states of each order and for a better bound
(:mod:`olla_solvers.recomputation.residency`). The search of an order for which it has no optimum
(:mod:`olla_solvers.recomputation.search`) ends when it meets the bound, or its effort, counted in walks, is
spent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.errors import ProblemError
from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.recomputation.bounds import Bounds, LowerBound
from olla_solvers.recomputation.compiled import is_available
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.pool import Found
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds
from olla_solvers.recomputation.residency import CLOSE, Proposal, propose, solver_for
from olla_solvers.recomputation.search import Search

MOST_STEPS = 500_000
"""Operators that all walks together may pass: some second of processor time."""

LEAST_WALKS = 120
"""Walks that are made on steps of any length."""

SHARE_OF_STARTS, SHARE_OF_ANNEALING = 0.3, 0.3
"""Shares of the walks that are for starts, and for annealing what was found."""

SHARE_OF_PROPOSALS = 0.3
"""Walks on top of these that are for what integer programs propose, as a share of them."""

WORTH_COMPILING = 4.0
"""The effort from which on walks and annealing are compiled, if numba is installed."""

FASTER = 50
"""Times as many walks are made in annealing then."""

LEAST_COMPILED_WALKS = 240
"""Walks that are then made on steps of any length."""

PROGRAMS_SECONDS = 1.0
"""Of processor time, for integer programs of one budget at the usual effort."""

SHARE_FOR_PROGRAMS = 0.5
"""Share of what is left until a deadline that programs of one budget may take."""

LEAST_UNITS = 20
"""Fewer units that could be dropped are searched through before a solver would have started."""

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
    solver: str = "auto",
) -> WithinBudget:
    """Return the fastest sequence within a budget.

    Args:
        problems: the step, in one order or several.
        budget_bytes: of planned arrays and workspaces.
        deadline: ``time.monotonic()`` at which to stop with what there is.
        effort: how many times the usual number of walks to spend. From 4 on, annealing is compiled if numba
            is installed.
        seed: of the random numbers in annealing.
        solver: ``cbc``, ``gurobi`` or ``highs`` for integer programs; ``auto`` for one that is installed,
            ``none`` for no programs.

    Returns:
        The fastest sequence that was found; or, if none was within the budget, the one with the lowest peak,
        with a bound that says whether that is proven impossible.

    Raises:
        ProblemError: if order, seconds or makers do not fit a problem.
        SolverUnavailableError: if the solver is not installed.
    """
    return curve(problems, (budget_bytes,), deadline=deadline, effort=effort, seed=seed, solver=solver)[0]


def curve(
    problems: RecomputationProblem | Sequence[RecomputationProblem],
    budgets: Sequence[Bytes],
    *,
    deadline: float = math.inf,
    effort: float = 1.0,
    seed: int = 0,
    solver: str = "auto",
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
        solver: for integer programs; see :func:`least_time`.

    Returns:
        An answer for each budget, in their sequence.

    Raises:
        ProblemError: if there is no problem, or order, seconds or makers do not fit one.
        SolverUnavailableError: if the solver is not installed.
    """
    given = (problems,) if isinstance(problems, RecomputationProblem) else tuple(problems)
    if not given:
        raise ProblemError("there is no order of a step to plan on")
    planner = _Planner(given, deadline, effort, seed, solver_for(solver))
    for budget in sorted(set(budgets), reverse=True):
        planner.search(budget)
    return tuple(planner.answer(budget) for budget in budgets)


class _Planner:
    """Searches of all orders, and the bounds, which need no order."""

    def __init__(
        self,
        problems: Sequence[RecomputationProblem],
        deadline: float,
        effort: float,
        seed: int,
        solver: str | None,
    ) -> None:
        instances = [prepare(problem) for problem in problems]
        self._problems = problems
        self._bounds = Bounds(instances[0])
        self._proven: dict[Bytes, LowerBound] = {}
        self._deadline = deadline
        self._effort = effort
        is_compiled = effort >= WORTH_COMPILING and is_available()
        units = max(len(instance.units.arrays) for instance in instances)
        least = LEAST_COMPILED_WALKS if is_compiled else LEAST_WALKS
        usual = max(least, min(MOST_STEPS // max(1, len(problems[0].order)), WALKS_A_UNIT * units))
        self._walks = round(effort * usual) // len(instances)
        self._tries = round(SHARE_OF_ANNEALING * self._walks) * (FASTER if is_compiled else 1)
        self._seed = seed
        self._solver = solver if units >= LEAST_UNITS else None
        self._searches = [Search(instance, deadline, is_compiled=is_compiled) for instance in instances]
        self._is_started = False

    def search(self, budget_bytes: Bytes) -> None:
        """Search all orders, as long as what is found is slower than what is proven."""
        if self._bound(budget_bytes).is_impossible and self._is_started:
            return
        if self._is_settled(budget_bytes):
            return
        try:
            proposals = self._ask_solver(budget_bytes)
            settled = {proposal.order for proposal in proposals if proposal.is_optimal}
            if settled:
                self._add(proposals)
            for order, search in enumerate(self._searches):
                if order in settled or self._is_settled(budget_bytes):
                    continue
                self._start()
                search.meet(budget_bytes, round((1 - SHARE_OF_STARTS - SHARE_OF_ANNEALING) * self._walks))
                # What was proposed is close to the budget, and would hide other ways to meet it.
                self._add([proposal for proposal in proposals if proposal.order == order])
                if proposals:
                    search.meet(budget_bytes, round(SHARE_OF_PROPOSALS * self._walks))
                if not self._is_settled(budget_bytes):
                    search.improve(budget_bytes, self._tries, self._seed)
        except DeadlinePassedError:
            return

    def _start(self) -> None:
        """Find where the searches begin, once for all budgets."""
        if not self._is_started:
            self._is_started = True
            for search in self._searches:
                search.find_starts(round(SHARE_OF_STARTS * self._walks))

    def _is_settled(self, budget_bytes: Bytes) -> bool:
        """Return True if states within a budget are as fast as is proven."""
        found = self._fastest(budget_bytes)[1]
        slack = CLOSE * self._problems[0].step_seconds
        return found is not None and found.extra_seconds <= self._bound(budget_bytes).extra_seconds + slack

    def _ask_solver(self, budget_bytes: Bytes) -> tuple[Proposal, ...]:
        """Return what integer programs find; keep what they prove."""
        bound = self._bound(budget_bytes)
        if self._solver is None or bound.is_impossible:
            return ()
        left = SHARE_FOR_PROGRAMS * (self._deadline - time.monotonic())
        proposals = propose(
            self._problems, bound, self._solver, seconds=self._effort * PROGRAMS_SECONDS, by_the_clock=left
        )
        self._keep_bound(proposals.bound)
        return proposals.states

    def _add(self, proposals: Sequence[Proposal]) -> None:
        """Add proposed states to what was found."""
        for proposal in proposals:
            search = self._searches[proposal.order]
            search.try_states(search.evaluator.states_of(proposal.positions, proposal.dropped))

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
            self._keep_bound(self._bounds.lower_bound(budget_bytes, self._deadline))
        return self._proven[budget_bytes]

    def _keep_bound(self, bound: LowerBound) -> None:
        """Note what is proven; what holds for a larger budget does for this one, too."""
        larger = [each for budget, each in self._proven.items() if budget >= bound.budget_bytes]
        best = max((*larger, bound), key=lambda each: each.extra_seconds)
        least_bytes = max(bound.least_bytes, *(each.least_bytes for each in larger), 0)
        self._proven[bound.budget_bytes] = replace(
            best, budget_bytes=bound.budget_bytes, least_bytes=least_bytes
        )

    def _fastest(self, budget_bytes: Bytes) -> tuple[Search, Found | None]:
        best: tuple[Search, Found | None] = (self._searches[0], None)
        for search in self._searches:
            found = search.pool.fastest(budget_bytes)
            if found is not None and (best[1] is None or found.extra_seconds < best[1].extra_seconds):
                best = (search, found)
        return best
