"""Solves the program over retention intervals: the referee for plans of small steps.

It is started from the best of the other published plans, which stays the answer unless the program's is
faster. What it proves holds for the order of the problem and what
:mod:`~olla_solvers.recomputation.published.retention_program` allows, which contains the states of the
evaluator unless the report says otherwise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from olla_solvers.ilp import backends
from olla_solvers.plan import SolverStatus
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds
from olla_solvers.recomputation.published.low_cost import low_cost
from olla_solvers.recomputation.published.recursive import recursive
from olla_solvers.recomputation.published.retention_program import RetentionProgram, TooLargeError
from olla_solvers.recomputation.published.segments import segments
from olla_solvers.recomputation.published.sequence import measure

DEFAULT_SECONDS = 60.0
"""Time limit if none is given."""

TOLERANCE = 1e-6
"""Of solvers' objectives and bounds, relative to the step's cost."""


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What the program found and proved.

    Attributes:
        plan: the fastest known within the budget, or the one of smallest peak if none is known.
        bound_seconds: proven: no plan that the program allows takes less extra time; None if nothing is.
        is_impossible: proven: no plan that the program allows keeps the budget.
        is_complete: whether the program allows all that the evaluator's states are.
        status: how the solver ended.
        variables: columns of the program.
        constraints: rows of the program.
        seconds: wall-clock time of stating and solving.
        detail: the solver's own words.
    """

    plan: Recomputation
    bound_seconds: Seconds | None
    is_impossible: bool
    is_complete: bool
    status: SolverStatus
    variables: int = 0
    constraints: int = 0
    seconds: float = 0.0
    detail: str = ""

    @property
    def is_optimal(self) -> bool:
        """True if the plan takes no more than the bound."""
        return self.bound_seconds is not None and self.plan.extra_seconds <= self.bound_seconds


def retention(
    problem: RecomputationProblem,
    budget_bytes: Bytes,
    *,
    solver: str,
    time_limit: float = DEFAULT_SECONDS,
    start: Recomputation | None = None,
) -> Recomputation:
    """Return the plan of :func:`solve_retention`; the fastest within the budget that is known.

    Args:
        problem: the step.
        budget_bytes: peak that is allowed.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        time_limit: seconds.
        start: a known plan.

    Raises:
        SolverUnavailableError: if the solver is unknown, missing or not licensed for the program.
    """
    return solve_retention(problem, budget_bytes, solver=solver, time_limit=time_limit, start=start).plan


def solve_retention(
    problem: RecomputationProblem,
    budget_bytes: Bytes,
    *,
    solver: str,
    time_limit: float = DEFAULT_SECONDS,
    start: Recomputation | None = None,
) -> RetentionReport:
    """Find the fastest plan within a budget, and prove that none is faster.

    Args:
        problem: the step; small ones only.
        budget_bytes: peak that is allowed.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        time_limit: seconds; the best plan so far is the answer then.
        start: a known plan; otherwise the best of the other methods is taken.

    Raises:
        SolverUnavailableError: if the solver is unknown, missing or not licensed for the program.
    """
    begin = time.monotonic()
    backends.require(solver)
    instance = prepare(problem)
    known = start or _best(problem, budget_bytes)
    try:
        program = RetentionProgram(instance, budget_bytes)
    except TooLargeError:
        seconds, detail = time.monotonic() - begin, "not stated: it would be too large"
        return RetentionReport(known, None, False, False, SolverStatus.FAILED, seconds=seconds, detail=detail)
    if known.peak_bytes <= budget_bytes:
        program.start_from(known)
    left = max(0.1, begin + time_limit - time.monotonic())
    solution = backends.solve(program.model, solver, time_limit=left)
    plan = _better(instance, program, solution, known, budget_bytes)
    bound = _bound(program, solution, plan)
    is_impossible = solution.outcome is backends.Outcome.INFEASIBLE and plan.peak_bytes > budget_bytes
    return RetentionReport(
        plan=plan,
        bound_seconds=bound,
        is_impossible=is_impossible,
        is_complete=program.is_complete,
        status=_status(solution.outcome, plan, bound, budget_bytes),
        variables=len(program.model.lower),
        constraints=len(program.model.rows),
        seconds=time.monotonic() - begin,
        detail=solution.detail,
    )


def _best(problem: RecomputationProblem, budget_bytes: Bytes) -> Recomputation:
    plans = [method(problem, budget_bytes) for method in (segments, recursive, low_cost)]
    within = [plan for plan in plans if plan.peak_bytes <= budget_bytes]
    if within:
        return min(within, key=lambda plan: plan.extra_seconds)
    return min(plans, key=lambda plan: plan.peak_bytes)


def _better(
    instance: Instance,
    program: RetentionProgram,
    solution: backends.Solution,
    known: Recomputation,
    budget_bytes: Bytes,
) -> Recomputation:
    """Return the solution's plan, counted again in whole bytes, if it is better than the known one."""
    if solution.values is None:
        return known
    plan = measure(instance, program.decode(solution.values))
    is_known_within = known.peak_bytes <= budget_bytes
    if plan.peak_bytes > budget_bytes or (is_known_within and plan.extra_seconds >= known.extra_seconds):
        return known
    return plan


def _bound(program: RetentionProgram, solution: backends.Solution, plan: Recomputation) -> Seconds | None:
    """Return the seconds that the solver proved, less its tolerance; never more than the plan takes."""
    if solution.outcome is backends.Outcome.INFEASIBLE or solution.bound is None:
        return None
    bound = max(0.0, solution.bound / program.cost_of_second)
    slack = TOLERANCE * max(bound, program.step_seconds)
    if solution.outcome is backends.Outcome.OPTIMAL and abs(bound - plan.extra_seconds) <= slack:
        return plan.extra_seconds
    return max(0.0, bound - slack)


def _status(
    outcome: backends.Outcome, plan: Recomputation, bound: Seconds | None, budget_bytes: Bytes
) -> SolverStatus:
    if plan.peak_bytes > budget_bytes:
        if outcome is backends.Outcome.INFEASIBLE:
            return SolverStatus.INFEASIBLE
        stopped = outcome is backends.Outcome.STOPPED
        return SolverStatus.TIME_LIMIT_WITHOUT_INCUMBENT if stopped else SolverStatus.FAILED
    if bound is not None and plan.extra_seconds <= bound:
        return SolverStatus.OPTIMAL
    stopped = outcome in (backends.Outcome.STOPPED, backends.Outcome.OPTIMAL)
    return SolverStatus.TIME_LIMIT_WITH_INCUMBENT if stopped else SolverStatus.FAILED
