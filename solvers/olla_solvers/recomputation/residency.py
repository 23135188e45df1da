"""Finds states by integer programs of what is resident at few operators, and proves by them.

A program (:mod:`olla_solvers.recomputation.residency_program`) counts bytes at its moments alone. So the first
one has a single moment, where the bound by minimum cuts proves most. Its solution is walked; where the bytes
pass the budget there is another moment, and so on (cutting planes, but found by simulation). If the walk of an
optimum is within the budget, no states of that order are faster. If bytes pass the budget at a moment itself, by what
repetitions need meanwhile, its room becomes smaller, and nothing is proven any more.

A program of the same moments, but with what must have run before and after them in any order, proves a bound.

All this happens in a process of its own, which loads the solver; see :mod:`olla_solvers.effort.apart`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from olla_solvers.effort import apart
from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.ilp import backends
from olla_solvers.ilp.model import LinearModel
from olla_solvers.problem import Bytes, OperatorIndex, Timestep
from olla_solvers.recomputation.bounds import LowerBound, own_bytes, reachable
from olla_solvers.recomputation.evaluate import Evaluation, Evaluator
from olla_solvers.recomputation.instance import Instance, prepare
from olla_solvers.recomputation.problem import RecomputationProblem, Seconds
from olla_solvers.recomputation.residency_program import (
    COST_OF_STEP,
    Makers,
    Moment,
    ResidencyProgram,
    makers_of_operators,
    makers_of_units,
)

PREFERRED = ("highs", "cbc", "gurobi")
"""Solvers for ``auto``: the first that is installed. Programs are small, so it is the start that counts."""

MOST_MOMENTS = 6
"""Of one program."""

MOST_PROGRAMS = 8
"""For one order."""

MOST_COLUMNS = 6000
"""Larger programs take more time than they save."""

MOST_SECONDS = 2.0
"""For one program, by the clock."""

CLOSE = 2e-4
"""Share of the step's seconds by which states may be slower than what is proven."""

_MARGIN = 1e-6
"""Share of the step's seconds that solvers' tolerances may take from a bound."""


@dataclass(frozen=True)
class Proposal:
    """States of one order.

    Attributes:
        order: which of the orders.
        positions: of the moments in it.
        dropped: for each unit the places of the moments at which it is dropped; None if it was not decided.
        is_optimal: True if no states of the order within the budget are faster.
    """

    order: int
    positions: tuple[Timestep, ...]
    dropped: tuple[tuple[int, ...] | None, ...]
    is_optimal: bool


@dataclass(frozen=True)
class Proposals:
    """What programs have found for a budget.

    Attributes:
        bound: what is proven of any order.
        states: in the sequence in which they were found.
    """

    bound: LowerBound
    states: tuple[Proposal, ...] = ()


def solver_for(wanted: str) -> str | None:
    """Return the solver for programs, or None if none is wanted or installed.

    Args:
        wanted: ``auto``, ``none``, or a solver.

    Raises:
        SolverUnavailableError: if a solver is named that is not installed.
    """
    if wanted == "none":
        return None
    if wanted != "auto":
        backends.require(wanted)
        return wanted
    return next(filter(backends.is_installed, PREFERRED), None)


def propose(
    problems: Sequence[RecomputationProblem],
    bound: LowerBound,
    solver: str,
    *,
    seconds: Seconds,
    on_proposals: Callable[[Proposals], None] | None = None,
) -> Proposals:
    """Return states for a budget and a bound, both found by integer programs.

    Args:
        problems: the step, in one order or several.
        bound: what minimum cuts prove for the budget.
        solver: CBC, Gurobi or HiGHS.
        seconds: by the clock.
        on_proposals: called with what there is meanwhile.

    Returns:
        Without states if the time is too short or programs would be too large.
    """
    nothing = Proposals(bound)
    if bound.operator is None or bound.is_impossible or seconds < apart.LEAST_SECONDS:
        return nothing
    arguments = (tuple(problems), bound, solver, seconds)
    return apart.last_answer(propose_here, arguments, seconds, on_proposals) or nothing


def propose_here(
    problems: Sequence[RecomputationProblem],
    bound: LowerBound,
    solver: str,
    seconds: Seconds,
    offer: Callable[[Proposals], None],
) -> None:
    """Do what :func:`propose` says, in this process and its working folder.

    Args:
        problems: the step, in one order or several.
        bound: what minimum cuts prove for the budget.
        solver: CBC, Gurobi or HiGHS.
        seconds: by the clock.
        offer: called with each answer that is better than those before.
    """
    proposer = _Proposer(bound, solver, time.monotonic() + seconds, offer)
    try:
        proposer.run([prepare(problem) for problem in problems])
    except (_TooLargeError, DeadlinePassedError):
        return


class _TooLargeError(Exception):
    """Raised if a program is too large to be worth solving; never leaves this module."""


class _Proposer:
    """States and solves programs, one after the other."""

    def __init__(
        self, bound: LowerBound, solver: str, deadline: float, offer: Callable[[Proposals], None]
    ) -> None:
        self._found = Proposals(bound)
        self._solver = solver
        self._deadline = deadline
        self._offer = offer

    def run(self, instances: Sequence[Instance]) -> None:
        """Look for states of each order until some are as fast as is proven."""
        best = math.inf
        for index, instance in enumerate(instances):
            moments, fastest = self._improve_order(index, instance)
            best = min(best, fastest)
            if best < math.inf or index == len(instances) - 1:
                self._prove(instances[0], moments)
            bound = self._found.bound
            if best <= bound.extra_seconds + CLOSE * instance.problem.step_seconds:
                return

    def _improve_order(self, index: int, instance: Instance) -> tuple[list[OperatorIndex], Seconds]:
        """Propose states of an order; return the moments, and the seconds of states within the budget."""
        bound = self._found.bound
        evaluator = Evaluator(instance, self._deadline)
        makers = makers_of_units(instance)
        position = {operator: timestep for timestep, operator in enumerate(instance.problem.order)}
        rooms = {_operator(bound): bound.budget_bytes - own_bytes(instance, _operator(bound))}
        is_exact = True
        for _ in range(MOST_PROGRAMS):
            operators = sorted(rooms, key=position.__getitem__)
            moments = [moment_of_order(position, operator, rooms[operator]) for operator in operators]
            program = ResidencyProgram(instance, makers, moments)
            solution = self._solve(program.model)
            if solution.values is None:
                break
            is_optimal = is_exact and solution.outcome is backends.Outcome.OPTIMAL
            proposal = _proposal(index, instance, program, solution.values, operators, is_optimal)
            evaluation = evaluator.evaluate(evaluator.states_of(proposal.positions, proposal.dropped))
            is_within = evaluation.is_valid and evaluation.peak_bytes <= bound.budget_bytes
            proposal = replace(proposal, is_optimal=is_optimal and is_within)
            self._offer_more(replace(self._found, states=(*self._found.states, proposal)))
            if is_within:
                return operators, evaluation.extra_seconds
            if not evaluation.is_valid:
                break
            operator, excess_bytes = _worst(evaluator, evaluation, bound.budget_bytes)
            if operator in rooms:
                is_exact = False
                rooms[operator] -= excess_bytes
            elif len(rooms) < MOST_MOMENTS:
                rooms[operator] = bound.budget_bytes - own_bytes(instance, operator)
            else:
                break
        return operators, math.inf

    def _prove(self, instance: Instance, operators: Sequence[OperatorIndex]) -> None:
        """Prove a bound of any order by moments whose sequence is the same in all orders."""
        bound = self._found.bound
        chain = [_any_order(instance, _operator(bound), bound.budget_bytes)]
        for operator in operators:
            if all(moment.has_run[operator] or moment.is_to_come[operator] for moment in chain):
                if all(moment.operator != operator for moment in chain):
                    chain.append(_any_order(instance, operator, bound.budget_bytes))
        chain.sort(key=lambda moment: sum(moment.is_to_come), reverse=True)
        program = ResidencyProgram(instance, makers_of_operators(instance), chain)
        solution = self._solve(program.model)
        if solution.bound is None:
            return
        share = solution.bound / COST_OF_STEP - _MARGIN
        seconds = share * instance.problem.step_seconds
        if seconds > bound.extra_seconds:
            moments = tuple(moment.operator for moment in chain)
            self._offer_more(
                replace(self._found, bound=replace(bound, extra_seconds=seconds, moments=moments))
            )

    def _solve(self, model: LinearModel) -> backends.Solution:
        if len(model.lower) > MOST_COLUMNS:
            raise _TooLargeError
        left = min(MOST_SECONDS, self._deadline - time.monotonic())
        if left <= 0:
            raise DeadlinePassedError
        return backends.solve_here(model, self._solver, time_limit=left)

    def _offer_more(self, proposals: Proposals) -> None:
        self._found = proposals
        self._offer(proposals)


def _operator(bound: LowerBound) -> OperatorIndex:
    return bound.operator or 0


def moment_of_order(
    position: dict[OperatorIndex, Timestep], operator: OperatorIndex, room_bytes: Bytes
) -> Moment:
    """Return an operator's first run in an order.

    Args:
        position: of each operator in the order.
        operator: which.
        room_bytes: for what is resident.
    """
    here = position[operator]
    has_run = [position[other] < here for other in range(len(position))]
    return Moment(operator, room_bytes, has_run, [not ran for ran in has_run])


def _any_order(instance: Instance, operator: OperatorIndex, budget_bytes: Bytes) -> Moment:
    """Return an operator's first run in any order."""
    problem = instance.problem.problem
    return Moment(
        operator,
        budget_bytes - own_bytes(instance, operator),
        reachable(operator, problem.predecessors),
        reachable(operator, problem.successors),
    )


def _proposal(
    index: int,
    instance: Instance,
    program: ResidencyProgram,
    values: Sequence[float],
    operators: Sequence[OperatorIndex],
    is_optimal: bool,
) -> Proposal:
    """Return the states that a solution stands for."""
    position = {operator: timestep for timestep, operator in enumerate(instance.problem.order)}
    resident = [program.resident(values, at) for at in range(len(operators))]
    runs = [program.runs(values, at) for at in range(len(operators))]
    dropped = tuple(
        tuple(
            at
            for at, (there, again) in enumerate(zip(resident, runs, strict=True))
            # All of a unit's arrays are made again if one of them is.
            if unit in again or there.isdisjoint(arrays)
        )
        if any(map(program.mentions, arrays))
        else None
        for unit, arrays in enumerate(instance.units.arrays)
    )
    return Proposal(index, tuple(position[operator] for operator in operators), dropped, is_optimal)


def _worst(
    evaluator: Evaluator, evaluation: Evaluation, budget_bytes: Bytes
) -> tuple[OperatorIndex, Bytes]:
    """Return the late operator at or after the peak, and the bytes of the peak beyond the budget."""
    trace, problem = evaluator.trace, evaluator.instance.problem
    resident: list[Any] = trace.timestep_bytes[: evaluation.timesteps]
    peak = max(range(evaluation.timesteps), key=resident.__getitem__)
    late = (
        trace.operator[timestep]
        for timestep in range(peak, evaluation.timesteps)
        if not trace.copy[timestep] and problem.is_late[trace.operator[timestep]]
    )
    return next(late, problem.order[-1]), resident[peak] - budget_bytes
