"""Plans what is made again, for the joint planner: of the step as it is, and around what is swapped."""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.recomputation.bounds import Bounds
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.planning import Planner
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds


class Repetitions:
    """Plans a step within budgets, in the process that it is in."""

    def __init__(
        self,
        problems: Sequence[RecomputationProblem],
        deadline: float,
        effort: float,
        seed: int,
        solver: str | None,
        *,
        may_compile: bool,
    ) -> None:
        """Note how to plan.

        Args:
            problems: the step, in one order or several.
            deadline: ``time.monotonic()`` at which to stop with what there is.
            effort: how many times the usual effort to spend.
            seed: of random numbers.
            solver: for integer programs; None for none.
            may_compile: True to have numba compile walks if that pays; it stays in memory.
        """
        self._problems = problems
        self._options = deadline, effort, seed, solver
        self._may_compile = may_compile
        self._alone: Planner | None = None

    def alone(self, budget_bytes: Bytes) -> Recomputation:
        """Return the fastest sequence within a budget without swaps, or the lowest.

        Args:
            budget_bytes: of planned arrays and workspaces.
        """
        self._alone = self._alone or self._planner(self._problems)
        self._alone.search(budget_bytes)
        return self._alone.answer(budget_bytes).recomputation

    def around(
        self, problem: RecomputationProblem, budget_bytes: Bytes, most_extra_seconds: Seconds
    ) -> tuple[Recomputation | None, Seconds]:
        """Return the fastest sequence within a budget if arrays are elsewhere at times, and what is proven.

        Args:
            problem: the step, with stays.
            budget_bytes: of planned arrays and workspaces.
            most_extra_seconds: that repetitions may take.

        Returns:
            The sequence, None if it is proven to take more; and the least seconds of repetitions around what
            stays elsewhere.
        """
        planner = self._planner((problem,))
        proven = planner.bound(budget_bytes).extra_seconds
        if proven > most_extra_seconds:
            return None, proven
        planner.search(budget_bytes)
        return planner.answer(budget_bytes).recomputation, planner.bound(budget_bytes).extra_seconds

    def may_be_faster(
        self, budget_bytes: Bytes, extra_seconds: Seconds, operator: OperatorIndex | None
    ) -> bool:
        """Return False if no sequence without swaps is proven to be faster than others.

        Args:
            budget_bytes: of planned arrays and workspaces.
            extra_seconds: of these others.
            operator: at which the proof is likely; None to look for one.
        """
        bounds, deadline = Bounds(prepare(self._problems[0])), self._options[0]
        bound = (
            bounds.lower_bound(budget_bytes, deadline)
            if operator is None
            else bounds.of_operator(operator, budget_bytes, deadline)
        )
        return bound.extra_seconds < extra_seconds

    def _planner(self, problems: Sequence[RecomputationProblem]) -> Planner:
        return Planner(problems, *self._options, may_compile=self._may_compile)
