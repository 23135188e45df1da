"""Plans one step for several budgets: bounds, integer programs, then a search of each order.

A bound comes first (:mod:`olla_solvers.recomputation.bounds`). If there is an integer program solver, it is
asked for states of each order and for a better bound (:mod:`olla_solvers.recomputation.residency`). The
search of an order for which it has no optimum (:mod:`olla_solvers.recomputation.search`) ends when it meets
the bound, or its effort, counted in walks, is spent. Where that is far from the bound, all orders go on in
turns, also from each other's states. Walks are compiled where that pays, and for these turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.recomputation import compiled
from olla_solvers.recomputation.bounds import Bounds, LowerBound
from olla_solvers.recomputation.cuts import Cut
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.pool import Evaluated
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds
from olla_solvers.recomputation.residency import SETTLED, Proposal, Proposals, propose
from olla_solvers.recomputation.search import Search

MOST_STEPS = 500_000
"""Operators that all walks together may pass: some second of processor time."""

LEAST_WALKS = 120
"""Walks that are made on steps of any length."""

SHARE_OF_STARTS, SHARE_OF_ANNEALING = 0.3, 0.3
"""Shares of the walks that are for starts, and for annealing what was found."""

SHARE_OF_PROPOSALS = 0.3
"""Walks on top of these that are for what integer programs propose, as a share of them."""

WORTH_COMPILING = 400_000
"""Operators that walks must pass together for them to be compiled, if numba is installed."""

WORTH_IN_SMALL_STEPS = 4.0
"""The effort from which on they are compiled for steps of any size."""

MOST_COMPILED_STEPS, LEAST_COMPILED_WALKS = 10_000_000, 1_000
"""The same as above for compiled walks, of which annealing has as many again."""

LEAST_ANNEALED_STEPS = 60_000
"""Operators that annealing passes with such an effort in plain Python: a small step has few walks else."""

NEARLY = 1.05
"""Times the budget: states within it say what an order promises."""

FAR_IN_STEPS, FAR_FROM_PROVEN = 0.003, 0.03
"""Shares of the step's seconds and of those that are proven by which states are slower that are far."""

MOST_EXCHANGES, MOST_FRUITLESS = 6, 2
"""Turns in which all orders go on, also from each other's states, and those in a row that may gain nothing.
A single order meets the budget and is annealed again, with other random numbers."""

MOST_EXCHANGED_OPERATORS = 3000
"""In longer steps, bringing the states of another order within a budget takes many seconds."""

SEEDS_APART = 100
"""More seeds than one search uses."""

PROGRAMS_WORK = 0.6
"""Of the solver, for integer programs of one budget at the usual effort; see
:attr:`olla_solvers.ilp.backends.Solution.work`."""

SHARE_FOR_PROGRAMS = 0.5
"""Share of what is left until a deadline that programs of one budget may take."""

WALKS_A_UNIT, TRIES_A_UNIT = 40, 2_000
"""Walks, and walks of compiled annealing, that are worth making for each unit that could be dropped."""


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


class Planner:
    """Searches of all orders, and the bounds, which need no order."""

    def __init__(
        self,
        problems: Sequence[RecomputationProblem],
        deadline: float = math.inf,
        effort: float = 1.0,
        seed: int = 0,
        solver: str | None = None,
        *,
        may_compile: bool = False,
    ) -> None:
        """Prepare the orders.

        Args:
            problems: the step, in one order or several.
            deadline: ``time.monotonic()`` at which to stop with what there is.
            effort: how many times the usual number of walks to spend, for each budget.
            seed: of the random numbers in annealing.
            solver: for integer programs; None for none.
            may_compile: True to have numba compile walks if that pays; it stays in memory.

        Raises:
            ProblemError: if order, seconds or makers do not fit a problem.
        """
        self._instances = [prepare(problem) for problem in problems]
        self._step_seconds = problems[0].step_seconds
        self._operators = max(1, len(problems[0].order))
        self._bounds = Bounds(self._instances[0])
        self._proven: dict[Bytes, LowerBound] = {}
        self._deadline = deadline
        self._effort = effort
        self._units = max(len(instance.units.arrays) for instance in self._instances)
        self._walks = self._tries = 0
        self._seed = seed
        self._solver = solver
        self._may_compile = may_compile
        self._searches = [Search(instance, deadline) for instance in self._instances]
        self._is_started = self._is_compiled = False

    @property
    def units(self) -> int:
        """How many could be dropped."""
        return self._units

    @property
    def is_worth_compiling(self) -> bool:
        """True if the walks would take longer in plain Python than compiled code takes to load."""
        steps = self._usual_walks(is_compiled=False) * self._operators
        return steps >= WORTH_COMPILING or self._effort >= WORTH_IN_SMALL_STEPS

    def is_met_without(self, budget_bytes: Bytes) -> bool:
        """Return True if an order is within a budget without any repetition."""
        return any(search.plain.peak_bytes <= budget_bytes for search in self._searches)

    def search(
        self,
        budget_bytes: Bytes,
        report: Callable[[], None] | None = None,
        most_seconds: Seconds = math.inf,
    ) -> None:
        """Search all orders, as long as what is found is slower than what is proven.

        Args:
            budget_bytes: of planned arrays and workspaces.
            report: called before what takes long.
            most_seconds: of repetitions; nothing more is sought once it is proven that they take more.
        """
        if self.bound(budget_bytes).is_impossible and self._is_started:
            return
        if self._is_settled(budget_bytes) or self._is_beaten(budget_bytes, most_seconds):
            return
        try:
            asked = self._ask_solver(budget_bytes, most_seconds)
            if asked.is_beaten or self._is_beaten(budget_bytes, most_seconds):
                return
            proposals = asked.states
            settled = {proposal.order for proposal in proposals if proposal.is_optimal}
            if settled:
                self._add(proposals)
            for order, search in enumerate(self._searches):
                if order in settled or self._is_settled(budget_bytes):
                    continue
                if report is not None:
                    report()
                self._start()
                search.drop_cheapest(budget_bytes)
                search.meet(budget_bytes, round((1 - SHARE_OF_STARTS - SHARE_OF_ANNEALING) * self._walks))
                # What was proposed is close to the budget, and would hide other ways to meet it.
                self._add([proposal for proposal in proposals if proposal.order == order])
                if proposals:
                    search.meet(budget_bytes, round(SHARE_OF_PROPOSALS * self._walks))
                if not self._is_compiled and not self._is_settled(budget_bytes):
                    search.improve(budget_bytes, self._tries, self._seed)
            if len(settled) == len(self._searches) or self._is_settled(budget_bytes):
                return
            if report is not None:
                report()
            if self._is_far(budget_bytes):
                self._compile()
            if self._is_compiled:
                self._improve(budget_bytes, report)
        except DeadlinePassedError:
            return

    def _improve(self, budget_bytes: Bytes, report: Callable[[], None] | None) -> None:
        """Go on with the order that promises most, anneal the best states, and go on with all in turns."""
        # It may take what all orders together have taken, once more.
        search = self._best_search(round(NEARLY * budget_bytes))
        search.meet(budget_bytes, len(self._searches) * self._walks)
        self._best_search(budget_bytes).improve(budget_bytes, self._tries, self._seed)
        fruitless = 0
        for turn in range(MOST_EXCHANGES if self._operators <= MOST_EXCHANGED_OPERATORS else 0):
            if fruitless == MOST_FRUITLESS or not self._is_far(budget_bytes):
                return
            if report is not None:
                report()
            before = self._fastest(budget_bytes)[1]
            self._exchange(budget_bytes, self._seed + (turn + 1) * SEEDS_APART)
            after = self._fastest(budget_bytes)[1]
            fruitless = fruitless + 1 if after is before else 0

    def _exchange(self, budget_bytes: Bytes, seed: int) -> None:
        """Go on in all orders, also from the best states of any: one may be met while a better one is not."""
        best = self._best_search(budget_bytes)
        states = (best.pool.fastest(budget_bytes) or best.pool.lowest).states
        for search in self._searches:
            if search is not best and search.has_units_of(best):
                search.try_states_of(best, states)
            search.meet(budget_bytes, self._walks)
            search.improve(budget_bytes, self._tries, seed)

    def _start(self) -> None:
        """Find where the searches begin, once for all budgets."""
        if self._is_started:
            return
        self._is_started = True
        if self.is_worth_compiling:
            self._compile()
        self._share_effort()
        corners: list[Cut] = []
        for instance, search in zip(self._instances, self._searches, strict=True):
            if not corners or instance.units.arrays != self._instances[0].units.arrays:
                corners = search.corners()
            search.find_starts(corners, round(SHARE_OF_STARTS * self._walks))

    def _compile(self) -> None:
        """Have numba compile walks from now on, if that is allowed and possible."""
        if self._is_compiled or not self._may_compile:
            return
        self._is_compiled = self._may_compile = compiled.is_ready(self._deadline)
        if self._is_compiled:
            for search in self._searches:
                search.compile()
        self._share_effort()

    def _share_effort(self) -> None:
        """Set how many walks an order has for a budget, and how many annealing makes."""
        walks = round(self._effort * self._usual_walks(is_compiled=self._is_compiled))
        # Where walks may be compiled, all orders go on in turns; else each has all walks at once.
        is_shared = self._may_compile and compiled.is_available()
        self._walks = walks // len(self._searches) if is_shared else walks
        self._tries = round(SHARE_OF_ANNEALING * self._walks)
        if self._is_compiled:
            tries = min(MOST_COMPILED_STEPS // self._operators, TRIES_A_UNIT * self._units)
            self._tries = round(self._effort * tries)
        elif self._effort >= WORTH_IN_SMALL_STEPS:
            self._tries = max(self._tries, round(self._effort * LEAST_ANNEALED_STEPS) // self._operators)

    def _usual_walks(self, *, is_compiled: bool) -> int:
        most, least = (
            (MOST_COMPILED_STEPS, LEAST_COMPILED_WALKS) if is_compiled else (MOST_STEPS, LEAST_WALKS)
        )
        return max(least, min(most // self._operators, WALKS_A_UNIT * self._units))

    def _is_settled(self, budget_bytes: Bytes) -> bool:
        """Return True if states within a budget are as fast as is proven."""
        evaluated = self._fastest(budget_bytes)[1]
        slack = SETTLED * self._step_seconds
        return (
            evaluated is not None
            and evaluated.extra_seconds <= self.bound(budget_bytes).extra_seconds + slack
        )

    def _is_far(self, budget_bytes: Bytes) -> bool:
        """Return True if states within a budget are much slower than is proven, or there are none yet."""
        if self.bound(budget_bytes).is_impossible:
            return False
        evaluated = self._fastest(budget_bytes)[1]
        proven = self.bound(budget_bytes).extra_seconds
        slack = max(FAR_IN_STEPS * self._step_seconds, FAR_FROM_PROVEN * proven)
        return evaluated is None or evaluated.extra_seconds > proven + slack

    def _is_beaten(self, budget_bytes: Bytes, most_seconds: Seconds) -> bool:
        """Return True if it is proven that repetitions take more seconds than these."""
        return most_seconds < math.inf and self.bound(budget_bytes).extra_seconds >= most_seconds

    def _ask_solver(self, budget_bytes: Bytes, most_seconds: Seconds) -> Proposals:
        """Return what integer programs find; keep what they prove."""
        bound = self.bound(budget_bytes)
        if self._solver is None or bound.is_impossible:
            return Proposals(bound)
        left = SHARE_FOR_PROGRAMS * (self._deadline - time.monotonic())
        work = self._effort * PROGRAMS_WORK
        proposals = propose(
            self._instances, bound, self._solver, work=work, by_the_clock=left, most_seconds=most_seconds
        )
        self._keep_bound(proposals.bound)
        return proposals

    def _add(self, proposals: Sequence[Proposal]) -> None:
        """Add proposed states to what was found."""
        for proposal in proposals:
            search = self._searches[proposal.order]
            search.try_states(search.evaluator.states_of(proposal.positions, proposal.dropped))

    def answer(self, budget_bytes: Bytes) -> WithinBudget:
        """Return the fastest of all searches, or the lowest."""
        search = self._best_search(budget_bytes)
        evaluated = search.pool.fastest(budget_bytes) or search.pool.lowest
        evaluator = search.evaluator
        recomputation = evaluator.recomputation(evaluated.states)
        resident = evaluator.trace.timestep_bytes[: len(recomputation.executions)]
        at = max(range(len(resident)), key=resident.__getitem__, default=0)
        largest = recomputation.executions[at].operator if resident else 0
        return WithinBudget(budget_bytes, recomputation, self.bound(budget_bytes), largest)

    def _best_search(self, budget_bytes: Bytes) -> Search:
        """Return the search with the fastest states, or the lowest if there are none within the budget."""
        search, evaluated = self._fastest(budget_bytes)
        return search if evaluated else min(self._searches, key=lambda search: search.pool.lowest.peak_bytes)

    def bound(self, budget_bytes: Bytes) -> LowerBound:
        """Return what is proven of any sequence within a budget; of its order if arrays are elsewhere.

        Args:
            budget_bytes: of planned arrays and workspaces.
        """
        if budget_bytes not in self._proven:
            self._keep_bound(self._bounds.lower_bound(budget_bytes, self._deadline))
        return self._proven[budget_bytes]

    def _keep_bound(self, bound: LowerBound) -> None:
        """Note what is proven; what holds for a larger budget does for this one, too."""
        larger = [
            larger_bound for budget, larger_bound in self._proven.items() if budget >= bound.budget_bytes
        ]
        best = max((*larger, bound), key=lambda lower_bound: lower_bound.extra_seconds)
        least_bytes = max(bound.least_bytes, *(lower_bound.least_bytes for lower_bound in larger), 0)
        self._proven[bound.budget_bytes] = replace(
            best, budget_bytes=bound.budget_bytes, least_bytes=least_bytes
        )

    def _fastest(self, budget_bytes: Bytes) -> tuple[Search, Evaluated | None]:
        best: tuple[Search, Evaluated | None] = (self._searches[0], None)
        for search in self._searches:
            evaluated = search.pool.fastest(budget_bytes)
            if evaluated is not None and (best[1] is None or evaluated.extra_seconds < best[1].extra_seconds):
                best = (search, evaluated)
        return best
