"""The fastest sequence within a budget if each array may be kept, made again, or wait on the host.

What others plan as one large program falls into three parts. Which arrays wait on the host is chosen for the
order without repetitions, so that nothing stalls: greedily (:mod:`olla_solvers.swapping.choice`), where a
byte is worth what it is worth in the bound (:mod:`olla_solvers.swapping.bounds`), or less if its array is
made again for less; and, where arrays are few, by a program (:mod:`olla_solvers.swapping.choice_program`),
too. Then these arrays are elsewhere for so many operators of the order, and the fastest repetitions are
planned around that (:mod:`olla_solvers.recomputation.planning`). They come in backward and give the link
more time, so the arrays to swap are chosen once more in the sequence that comes out, and scheduled in its
time. Only what is left beyond the budget then is waited for.

Except for small steps, all of it is done in a process of its own; see :mod:`olla_solvers.effort.apart`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from olla_solvers.effort import apart
from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.ilp import backends
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.least_time import is_large, solver_of
from olla_solvers.recomputation.planning import Planner
from olla_solvers.recomputation.problem import (
    RecomputationProblem,
)
from olla_solvers.recomputation.residency import solver_for
from olla_solvers.swapping.joint_planner import JointPlanner, WithinBudgetAndLink
from olla_solvers.swapping.repetitions import Repetitions
from olla_solvers.swapping.transfers import Link


def least_time_with_swaps(
    problems: RecomputationProblem | Sequence[RecomputationProblem],
    budget_bytes: Bytes,
    link: Link,
    *,
    deadline: float = math.inf,
    effort: float = 1.0,
    seed: int = 0,
    solver: str = "auto",
) -> WithinBudgetAndLink:
    """Return the fastest sequence within a budget, and what waits on the host meanwhile.

    Args:
        problems: the step, in one order or several.
        budget_bytes: of planned arrays, workspaces and what is lent.
        link: which copies.
        deadline: ``time.monotonic()`` at which to stop with what there is.
        effort: how many times the usual effort to spend on repetitions.
        seed: of random numbers.
        solver: for integer programs; see :func:`olla_solvers.recomputation.least_time.least_time`.

    Returns:
        The fastest that was found; repetitions alone are faster by less than what counts as settled
        (:data:`~olla_solvers.recomputation.residency.SETTLED`), if at all. If none was within the budget, the
        one with the lowest peak.

    Raises:
        ProblemError: if order, seconds or makers do not fit a problem.
        SolverUnavailableError: if the solver is not installed.
    """
    given = (problems,) if isinstance(problems, RecomputationProblem) else tuple(problems)
    chosen = solver_for(solver)
    first = Planner(given[:1], deadline, effort, seed)
    left = deadline - time.monotonic()
    if is_large(first, chosen) and left >= apart.LEAST_SECONDS and not first.is_met_without(budget_bytes):
        arguments = given, budget_bytes, link, deadline, effort, seed, solver_of(first, chosen)
        answer: WithinBudgetAndLink | None = apart.last_answer(plan_apart, arguments, left)
        if answer is not None:
            return answer
    repetitions = Repetitions(given, deadline, effort, seed, None, may_compile=False)
    solve = partial(backends.solve, solver=chosen) if chosen is not None else None
    planner = JointPlanner(given[0], budget_bytes, link, deadline)
    planner.plan(given, repetitions, solve, lambda: None)
    return planner.answer()


def plan_apart(
    problems: Sequence[RecomputationProblem],
    budget_bytes: Bytes,
    link: Link,
    deadline: float,
    effort: float,
    seed: int,
    solver: str | None,
    offer: Callable[[WithinBudgetAndLink], None],
) -> None:
    """Do what :func:`least_time_with_swaps` says, in a process of its own.

    Args:
        problems: the step, in one order or several.
        budget_bytes: of planned arrays and workspaces.
        link: which copies.
        deadline: ``time.monotonic()``, the same in all processes, at which to stop with what there is.
        effort: how many times the usual effort to spend on repetitions.
        seed: of random numbers.
        solver: for integer programs; None for none.
        offer: called with each answer that is better than those before.
    """
    repetitions = Repetitions(problems, deadline, effort, seed, solver, may_compile=True)
    solve = partial(backends.solve_here, solver=solver) if solver is not None else None
    planner = JointPlanner(problems[0], budget_bytes, link, deadline)
    planner.plan(problems, repetitions, solve, apart.at_times(lambda: offer(planner.answer())))
    offer(planner.answer())


def least_time_of_swaps(
    problem: RecomputationProblem, budget_bytes: Bytes, link: Link, *, deadline: float = math.inf
) -> WithinBudgetAndLink:
    """Return the fastest sequence within a budget in which nothing runs again, to compare with.

    Args:
        problem: the step.
        budget_bytes: of planned arrays, workspaces and what is lent.
        link: which copies.
        deadline: ``time.monotonic()`` at which to stop with what there is.

    Returns:
        The fastest that was found, or the one with the lowest peak if none was within the budget.

    Raises:
        ProblemError: if order, seconds or makers do not fit the problem.
    """
    planner = JointPlanner(problem, budget_bytes, link, deadline)
    planner.try_plain()
    try:
        planner.improve()
    except DeadlinePassedError:
        pass  # The best so far is an answer.
    return planner.answer()
