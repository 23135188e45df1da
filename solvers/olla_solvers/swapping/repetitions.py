"""Plans what is made again, for the joint planner: of the step as it is, and around what is swapped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from olla_solvers.problem import Bytes
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

    def alone(self, budget_bytes: Bytes, most_extra_seconds: Seconds = math.inf) -> Recomputation:
        """Return the fastest sequence within a budget without swaps, or the lowest.

        Args:
            budget_bytes: of planned arrays and workspaces.
            most_extra_seconds: that repetitions may take to be of use; any sequence is returned if they are
                proven to take more.
        """
        self._alone = self._alone or self._planner(self._problems)
        self._alone.search(budget_bytes, most_seconds=most_extra_seconds)
        return self._alone.answer(budget_bytes).recomputation

    def around(
        self, problem: RecomputationProblem, budget_bytes: Bytes, most_extra_seconds: Seconds
    ) -> tuple[Recomputation, Seconds]:
        """Return the fastest sequence within a budget if arrays are elsewhere at times, and what is proven.

        Args:
            problem: the step, with stays.
            budget_bytes: of planned arrays and workspaces.
            most_extra_seconds: as of :meth:`alone`.

        Returns:
            The sequence, and the least seconds of repetitions around what stays elsewhere.
        """
        planner = self._planner((problem,))
        planner.search(budget_bytes, most_seconds=most_extra_seconds)
        return planner.answer(budget_bytes).recomputation, planner.bound(budget_bytes).extra_seconds

    def _planner(self, problems: Sequence[RecomputationProblem]) -> Planner:
        return Planner(problems, *self._options, may_compile=self._may_compile)
