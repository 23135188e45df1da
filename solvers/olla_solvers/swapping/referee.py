"""Solves the program with fetches: the referee for plans of small steps that recompute and swap."""

from __future__ import annotations

from dataclasses import dataclass

from olla_solvers.ilp import backends
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds
from olla_solvers.recomputation.published.retention_program import TooLargeError
from olla_solvers.recomputation.published.sequence import measure
from olla_solvers.swapping.fetch_program import FetchProgram
from olla_solvers.swapping.schedule import Swapped, swapped
from olla_solvers.swapping.timeline import timeline
from olla_solvers.swapping.transfers import Link

DEFAULT_SECONDS = 60.0
"""Time limit if none is given."""

TOLERANCE = 1e-5
"""Of solvers' objectives and bounds, relative to the step's cost."""


@dataclass(frozen=True)
class FetchReport:
    """What the program found and proved.

    Attributes:
        recomputation: the sequence; None if none was found.
        swapped: the same with its transfers, bytes and times.
        bound_seconds: proven: no plan that the program allows takes less beyond the step's own seconds; None
            if nothing is.
        is_impossible: proven: no plan that the program allows keeps the budget.
        is_complete: whether the program allows all that the evaluator's states are.
        outcome: how the solver ended.
    """

    recomputation: Recomputation | None
    swapped: Swapped | None
    bound_seconds: Seconds | None
    is_impossible: bool
    is_complete: bool
    outcome: backends.Outcome


def solve_with_fetches(
    problem: RecomputationProblem,
    budget_bytes: Bytes,
    link: Link,
    *,
    solver: str,
    time_limit: float = DEFAULT_SECONDS,
) -> FetchReport:
    """Find the fastest plan within a budget with a link, and prove that none is faster.

    Args:
        problem: the step; very small ones only.
        budget_bytes: peak that is allowed.
        link: which copies.
        solver: ``cbc``, ``gurobi`` or ``highs``.
        time_limit: seconds; the best plan so far is the answer then.

    Raises:
        SolverUnavailableError: if the solver is unknown, missing or not licensed for the program.
    """
    backends.require(solver)
    instance = prepare(problem)
    try:
        program = FetchProgram(instance, budget_bytes, link)
    except TooLargeError:
        return FetchReport(None, None, None, False, False, backends.Outcome.TOO_LARGE)
    solution = backends.solve(program.model, solver, time_limit=time_limit)
    recomputation = plan = None
    if solution.values is not None:
        executions = program.decode(solution.values)
        transfers = program.transfers(solution.values, executions)
        sizes = [problem.problem.arrays[transfer.array].size_bytes for transfer in transfers]
        recomputation = measure(instance, executions)
        plan = swapped(timeline(instance, executions), transfers, sizes, link)
    bound = None
    if solution.bound is not None:
        bound = max(0.0, solution.bound / program.cost_of_second - TOLERANCE * program.step_seconds)
    is_impossible = solution.outcome is backends.Outcome.INFEASIBLE
    return FetchReport(recomputation, plan, bound, is_impossible, program.is_complete, solution.outcome)
