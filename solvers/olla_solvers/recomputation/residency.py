"""Finds states by integer programs of what is resident at few operators, and proves by them.

A program (:mod:`olla_solvers.recomputation.residency_program`) counts bytes at its moments alone. So the
first one has a single moment, where the bound by minimum cuts proves most. Its solution is walked; where the
bytes pass the budget there is another moment, and so on (cutting planes, but found by simulation). If the
walk of an optimum is within the budget, no states of that order are faster. If bytes pass the budget at a
moment itself, by what repetitions need meanwhile, its room becomes smaller, and nothing is proven any more.

A program of the same moments, but with what must have run before and after them in any order, proves a bound.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.ilp import backends
from olla_solvers.ilp.model import LinearModel
from olla_solvers.problem import Bytes, OperatorIndex, Timestep
from olla_solvers.recomputation.bounds import LowerBound, own_bytes, reachable
from olla_solvers.recomputation.evaluate import Evaluation, Evaluator
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.recomputation.residency_program import (
    COST_OF_STEP,
    Moment,
    ResidencyProgram,
    makers_of_operators,
    makers_of_units,
)

PREFERRED = ("highs", "cbc", "gurobi")
"""Solvers for ``auto``: the first that is installed. Programs are small, so it is the start that counts."""

MOST_MOMENTS = 6
"""Of one program."""

NEW_MOMENTS, APART = 2, 20
"""Moments that are added after a walk, and the share of backward, as reciprocal, that lies between them."""

FAR = 0.05
"""Share of the budget by which it must be passed for more than one to be added."""

MOST_PROGRAMS = 8
"""For one order."""

MOST_COLUMNS = 6000
"""Larger programs take more time than they save."""

MOST_WORK = 2.0
"""For one program, in solvers' measure (:attr:`olla_solvers.ilp.backends.Solution.work`)."""

SLOWEST, LEAST_BY_THE_CLOCK = 4.0, 5.0
"""Seconds by the clock that a unit of work may take where other processes run, too, and the least."""

LEAST_SECONDS = 2.0
"""By the clock: for less programs are not begun."""

SHARE_OF_SEARCH = 0.7
"""Share of the work that is for programs of orders; the rest is for a bound of any order."""

SHARE_OF_PROGRAM = 0.5
"""Share of what is left of that which one program may take if there are other orders."""

CLOSE = 2e-4
"""Share of the step's seconds by which the solution of a program may be slower than what is proven of it."""

SETTLED = 5e-4
"""Share of the step's seconds by which states must be slower than what is proven for others to be sought."""

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
        is_beaten: True if no states of any of the orders take less than what is of use.
    """

    bound: LowerBound
    states: tuple[Proposal, ...] = ()
    is_beaten: bool = False


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
    instances: Sequence[Instance],
    bound: LowerBound,
    solver: str,
    *,
    work: float,
    by_the_clock: Seconds = math.inf,
    most_seconds: Seconds = math.inf,
) -> Proposals:
    """Return states for a budget and a bound, both found by integer programs.

    Args:
        instances: the step, in one order or several.
        bound: what minimum cuts prove for the budget.
        solver: CBC, Gurobi or HiGHS, which is loaded, and may write files to the working folder.
        work: of the solver, in its measure (:attr:`olla_solvers.ilp.backends.Solution.work`).
        by_the_clock: seconds that it may take at most.
        most_seconds: of repetitions; states that take more are of no use.

    Returns:
        Without states if the time is too short or programs would be too large.
    """
    by_the_clock = min(by_the_clock, max(LEAST_BY_THE_CLOCK, SLOWEST * work))
    proposer = _Proposer(bound, solver, work, time.monotonic() + by_the_clock)
    if bound.operator is None or bound.is_impossible or by_the_clock < LEAST_SECONDS:
        return proposer.proposals
    with contextlib.suppress(_TooLargeError, DeadlinePassedError):
        proposer.run(instances, most_seconds)
    return proposer.proposals


class _TooLargeError(Exception):
    """Raised if a program is too large to be worth solving; never leaves this module."""


class _Order:
    """One order, and the program of it.

    Attributes:
        index: which of the orders.
        evaluator: of it.
        is_exact: True as long as no states within the budget are excluded.
        rooms: for each moment's operator the bytes for what is resident.
        programs: how many were solved.
        seconds: of the last program's solution.
        least_seconds: that any states of the order take, as far as was proven.
        is_open: True if another program may find faster states.
    """

    def __init__(self, index: int, instance: Instance, bound: LowerBound) -> None:
        self.index = index
        self.evaluator = Evaluator(instance)
        self.is_exact = True
        self.rooms = {_operator(bound): bound.budget_bytes - own_bytes(instance, _operator(bound))}
        self.programs = 0
        self.seconds = self.least_seconds = 0.0
        self.is_open = True
        self._position = {operator: timestep for timestep, operator in enumerate(instance.problem.order)}
        self._makers = makers_of_units(instance)

    @property
    def operators(self) -> list[OperatorIndex]:
        """Those of the moments, in the sequence of the order."""
        return sorted(self.rooms, key=self._position.__getitem__)

    def program(self) -> ResidencyProgram:
        """State the next program."""
        instance = self.evaluator.instance
        moments = [self._moment(operator) for operator in self.operators]
        return ResidencyProgram(instance, self._makers, moments)

    def _moment(self, operator: OperatorIndex) -> Moment:
        here = self._position[operator]
        has_run = [self._position[other] < here for other in range(len(self._position))]
        is_to_come = [not ran for ran in has_run]
        elsewhere = self.evaluator.instance.stays_at(here)
        return Moment(operator, self.rooms[operator], has_run, is_to_come, here, elsewhere)

    def proposal(self, program: ResidencyProgram, values: Sequence[float], is_optimal: bool) -> Proposal:
        """Return the states that a solution stands for."""
        operators = self.operators
        positions = tuple(self._position[operator] for operator in operators)
        resident = [program.resident(values, at) for at in range(len(operators))]
        runs = [program.runs(values, at) for at in range(len(operators))]
        units = self.evaluator.instance.units
        dropped = tuple(
            tuple(
                at
                for at, (there, again) in enumerate(zip(resident, runs, strict=True))
                # All of a unit's arrays are made again if one of them is.
                if units.earliest[unit] <= positions[at] and (unit in again or there.isdisjoint(arrays))
            )
            if any(map(program.mentions, arrays))
            else None
            for unit, arrays in enumerate(units.arrays)
        )
        return Proposal(self.index, positions, dropped, is_optimal)

    def tighten(
        self, program: ResidencyProgram, values: Sequence[float], evaluation: Evaluation, budget_bytes: Bytes
    ) -> bool:
        """Add moments where bytes pass the budget, or make room there; return False if neither goes."""
        worst, *others = _beyond(self.evaluator, evaluation, budget_bytes)
        if worst.operator in self.rooms:
            self.is_exact = False
            at = self.operators.index(worst.operator)
            self.rooms[worst.operator] = program.resident_bytes(values, at) - worst.excess_bytes
        is_far = worst.excess_bytes > FAR * budget_bytes
        for new in (worst, *others) if is_far else (worst,):
            if new.operator not in self.rooms and len(self.rooms) < MOST_MOMENTS:
                own = own_bytes(self.evaluator.instance, new.operator)
                self.rooms[new.operator] = budget_bytes - own
        return worst.operator in self.rooms


class _Proposer:
    """States and solves programs, one after the other.

    Attributes:
        proposals: so far.
    """

    def __init__(self, bound: LowerBound, solver: str, work: float, deadline: float) -> None:
        self.proposals = Proposals(bound)
        self._solver = solver
        self._work = self._left = work
        self._deadline = deadline
        # One moment's program is often the same in all orders.
        self._solved: dict[Hashable, backends.Solution] = {}

    def run(self, instances: Sequence[Instance], most_seconds: Seconds) -> None:
        """Look for states of the order that may be the fastest, until none is left; then for a bound."""
        bound = self.proposals.bound
        orders = [_Order(index, instance, bound) for index, instance in enumerate(instances)]
        best, best_order = most_seconds, orders[0]
        slack = SETTLED * instances[0].problem.step_seconds
        is_proven = False
        while True:
            if not is_proven and all(order.programs for order in orders):
                self._prove(instances[0], ())
                is_proven = True
            left = [order for order in orders if order.is_open and order.seconds < best - slack]
            if not left or self._left <= (1 - SHARE_OF_SEARCH) * self._work:
                break
            order = min(left, key=lambda order: order.seconds)
            work = self._left - (1 - SHARE_OF_SEARCH) * self._work
            seconds = self._advance(order, work if len(left) == 1 else SHARE_OF_PROGRAM * work)
            if seconds < best:
                best, best_order = seconds, order
            if best <= self.proposals.bound.extra_seconds + slack:
                return
            if all(order.least_seconds >= most_seconds for order in orders):
                self.proposals = replace(self.proposals, is_beaten=True)
                return
        self._prove(instances[0], best_order.operators)

    def _advance(self, order: _Order, work: float) -> Seconds:
        """Solve an order's next program; return the seconds of its states, infinite beyond the budget."""
        budget_bytes, evaluator = self.proposals.bound.budget_bytes, order.evaluator
        order.programs += 1
        order.is_open = order.programs < MOST_PROGRAMS
        program = order.program()
        solution = self._solve(program.model, work)
        if solution.values is None:
            order.is_open = False
            return math.inf
        is_optimal = order.is_exact and solution.outcome is backends.Outcome.OPTIMAL
        if is_optimal and solution.bound is not None:
            share = solution.bound / COST_OF_STEP - _MARGIN
            order.least_seconds = share * evaluator.instance.problem.step_seconds
        proposal = order.proposal(program, solution.values, is_optimal)
        evaluation = evaluator.evaluate(evaluator.states_of(proposal.positions, proposal.dropped))
        order.seconds = max(order.seconds, evaluation.extra_seconds)
        is_within = evaluation.is_valid and evaluation.peak_bytes <= budget_bytes
        # A walk may take longer than the program says: it runs again what is wanted between the moments.
        slack = SETTLED * evaluator.instance.problem.step_seconds
        is_as_fast = evaluation.extra_seconds <= order.least_seconds + slack
        proposal = replace(proposal, is_optimal=is_optimal and is_within and is_as_fast)
        self.proposals = replace(self.proposals, states=(*self.proposals.states, proposal))
        if is_within or not evaluation.is_valid:
            order.is_open = False
        elif not order.tighten(program, solution.values, evaluation, budget_bytes):
            order.is_open = False
        return evaluation.extra_seconds if is_within else math.inf

    def _prove(self, instance: Instance, operators: Sequence[OperatorIndex]) -> None:
        """Prove a bound of any order by moments whose sequence is the same in all orders.

        Nothing is proven if arrays are elsewhere at times, which are those of one order.
        """
        if instance.problem.stays:
            return
        bound = self.proposals.bound
        chain = [moment_of_any_order(instance, _operator(bound), bound.budget_bytes)]
        for operator in operators:
            if all(moment.has_run[operator] or moment.is_to_come[operator] for moment in chain):
                if all(moment.operator != operator for moment in chain):
                    chain.append(moment_of_any_order(instance, operator, bound.budget_bytes))
        chain.sort(key=lambda moment: sum(moment.is_to_come), reverse=True)
        program = ResidencyProgram(instance, makers_of_operators(instance), chain)
        solution = self._solve(program.model, self._left)
        if solution.bound is None:
            return
        share = solution.bound / COST_OF_STEP - _MARGIN
        seconds = share * instance.problem.step_seconds
        if seconds > bound.extra_seconds:
            moments = tuple(moment.operator for moment in chain)
            self.proposals = replace(
                self.proposals, bound=replace(bound, extra_seconds=seconds, moments=moments)
            )

    def _solve(self, model: LinearModel, work: float) -> backends.Solution:
        size = len(model.lower), len(model.rows)
        if size[0] > MOST_COLUMNS or not backends.may_take(self._solver, *size):
            raise _TooLargeError
        program = tuple(model.lower), tuple(model.upper), tuple(model.rows)
        if program not in self._solved:
            seconds = self._deadline - time.monotonic()
            if seconds <= 0 or work <= 0:
                raise DeadlinePassedError
            solution = backends.solve_here(
                model, self._solver, time_limit=seconds, gap=CLOSE * COST_OF_STEP, work=min(MOST_WORK, work)
            )
            self._left -= solution.work
            self._solved[program] = solution
        return self._solved[program]


def _operator(bound: LowerBound) -> OperatorIndex:
    return bound.operator or 0


def moment_of_any_order(instance: Instance, operator: OperatorIndex, budget_bytes: Bytes) -> Moment:
    """Return an operator's first run in any order.

    Args:
        instance: the step.
        operator: which.
        budget_bytes: of planned arrays and workspaces.
    """
    problem = instance.problem.problem
    return Moment(
        operator,
        budget_bytes - own_bytes(instance, operator),
        reachable(operator, problem.predecessors),
        reachable(operator, problem.successors),
    )


@dataclass(frozen=True, slots=True)
class _Excess:
    """Bytes beyond the budget when a late operator runs, or something runs again for it."""

    operator: OperatorIndex
    excess_bytes: Bytes


def _beyond(evaluator: Evaluator, evaluation: Evaluation, budget_bytes: Bytes) -> list[_Excess]:
    """Return where bytes pass the budget, the worst first, at operators that are not close to each other."""
    trace, problem = evaluator.trace, evaluator.instance.problem
    excess_bytes: dict[OperatorIndex, Bytes] = {}
    place: dict[OperatorIndex, Timestep] = {}
    operator = problem.order[-1]
    for timestep in reversed(range(evaluation.timesteps)):
        if not trace.copy[timestep] and problem.phases[trace.operator[timestep]]:
            operator = trace.operator[timestep]
            place[operator] = timestep
        beyond_bytes = trace.timestep_bytes[timestep] - budget_bytes
        excess_bytes[operator] = max(beyond_bytes, excess_bytes.get(operator, 0))
    result: list[_Excess] = []
    for operator in sorted(excess_bytes, key=lambda late: -excess_bytes[late]):
        if excess_bytes[operator] <= 0 or len(result) == NEW_MOMENTS:
            break
        if all(abs(place[operator] - place[other.operator]) > len(place) // APART for other in result):
            result.append(_Excess(operator, excess_bytes[operator]))
    return result
