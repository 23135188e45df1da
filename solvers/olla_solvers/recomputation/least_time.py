"""The fastest sequence within a budget, how far it is from what is proven, and the curve over budgets.

Several orders of the step may be given: one with a small peak may keep alive what another makes again
cheaply. Except for small steps, they are planned on (:mod:`olla_solvers.recomputation.planning`) in a process
of its own, which loads a solver and compiled code; see :mod:`olla_solvers.effort.apart`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from olla_solvers.effort import apart
from olla_solvers.errors import ProblemError
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.compiled import is_available
from olla_solvers.recomputation.planning import Planner, WithinBudget
from olla_solvers.recomputation.problem import RecomputationProblem
from olla_solvers.recomputation.residency import solver_for

__all__ = ["WithinBudget", "curve", "curve_apart", "least_time"]

LEAST_UNITS = 20
"""Fewer units that could be dropped are searched through before a process would have started."""


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
        effort: how many times the usual number of walks to spend.
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
        effort: how many times the usual number of walks to spend, for each budget.
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
    chosen = solver_for(solver)
    first = Planner(given[:1], deadline, effort, seed)
    left = deadline - time.monotonic()
    if (
        is_large(first, chosen)
        and left >= apart.LEAST_SECONDS
        and not all(map(first.is_met_without, budgets))
    ):
        arguments = (given, tuple(budgets), deadline, effort, seed, solver_of(first, chosen))
        answers: tuple[WithinBudget, ...] | None = apart.last_answer(curve_apart, arguments, left)
        if answers is not None:
            return answers
    return _answers(first if len(given) == 1 else Planner(given, deadline, effort, seed), budgets)


def solver_of(planner: Planner, solver: str | None) -> str | None:
    """Return the solver if programs are worth stating for a step.

    Args:
        planner: of the step.
        solver: that is there; None if none is.
    """
    return solver if planner.units >= LEAST_UNITS else None


def is_large(planner: Planner, solver: str | None) -> bool:
    """Return True if planning a step takes longer than starting a process to plan it in.

    Args:
        planner: of the step.
        solver: that is there; None if none is.
    """
    return solver_of(planner, solver) is not None or (planner.is_worth_compiling and is_available())


def curve_apart(
    problems: Sequence[RecomputationProblem],
    budgets: Sequence[Bytes],
    deadline: float,
    effort: float,
    seed: int,
    solver: str | None,
    offer: Callable[[tuple[WithinBudget, ...]], None],
) -> None:
    """Do what :func:`curve` says, in a process of its own.

    Args:
        problems: the step, in one order or several.
        budgets: of planned arrays and workspaces, in any sequence.
        deadline: ``time.monotonic()``, the same in all processes, at which to stop with what there is.
        effort: how many times the usual number of walks to spend, for each budget.
        seed: of the random numbers in annealing.
        solver: for integer programs; None for none.
        offer: called with each answer that is better than those before.
    """
    planner = Planner(problems, deadline, effort, seed, solver, may_compile=True)
    report = apart.at_times(lambda: offer(tuple(planner.answer(budget) for budget in budgets)))
    offer(_answers(planner, budgets, report))


def _answers(
    planner: Planner, budgets: Sequence[Bytes], report: Callable[[], None] | None = None
) -> tuple[WithinBudget, ...]:
    for budget in sorted(set(budgets), reverse=True):
        planner.search(budget, report)
    return tuple(planner.answer(budget) for budget in budgets)
