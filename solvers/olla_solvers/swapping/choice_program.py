"""States the integer program of what is resident, made again or on the host at some operators.

:class:`~olla_solvers.recomputation.residency_program.ResidencyProgram` says of each array whether it is kept
at few moments of an order. Here a binary more says of each that is kept whether it is on the host at the
moment, which takes no room but the link's time. At a moment that begins at t and ends at t':

* of the arrays on the host at the moment, those last accessed after any earlier r were copied out in t - r;
* those that are needed again before any later d are copied in in d - t'.

For a link that copies one array after the other these are all conditions for doing so without a stall, at one
moment. Between moments the copies are not compared, and repetitions are taken to leave the times as they are:
the solution says what to swap, and its schedule what that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from olla_solvers.ilp import backends
from olla_solvers.ilp.model import Column, Expression
from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.bounds import LowerBound, own_bytes
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.recomputation.residency_program import (
    BYTES_OF_UNIT,
    COST_OF_STEP,
    Makers,
    Moment,
    ResidencyProgram,
    makers_of_units,
)
from olla_solvers.swapping.choice import SMALL
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.timeline import Timeline
from olla_solvers.swapping.transfers import Link

COST_OF_SWAPS = 0.01
"""Of the objective, if all bytes were swapped: of choices that are as fast, those with fewer are better."""

Solve: TypeAlias = Callable[..., backends.Solution]
"""A function of :mod:`olla_solvers.ilp.backends` for some solver."""

MOST_COLUMNS = 1500
"""Larger programs take more time than they save: of many arrays, some fill the link in any case."""

MOST_WORK = 0.5
"""For one program, in the solver's measure (:attr:`olla_solvers.ilp.backends.Solution.work`)."""

SLOWEST = 8.0
"""Seconds by the clock that a unit of work may take where other processes run, too."""

CLOSE = 2e-4
"""Share of the step's seconds by which a choice may be slower than what is proven of the program."""

APART = 3
"""Parts into which the moments divide what is beyond the budget."""


def choose_by_program(
    instance: Instance,
    timeline: Timeline,
    link: Link,
    bound: LowerBound,
    solve: Solve,
    *,
    by_the_clock: Seconds,
) -> list[Gap] | None:
    """Return the gaps that a program chooses at some operators of an order.

    Args:
        instance: the step.
        timeline: of the order without repetitions.
        link: which copies.
        bound: proven for the budget; its operator is one of those looked at.
        solve: solves programs.
        by_the_clock: seconds that it may take at most.

    Returns:
        None if nothing was found in time.
    """
    problem, budget_bytes = instance.problem, bound.budget_bytes
    beyond = [
        timestep
        for timestep, operator in enumerate(problem.order)
        if problem.phases[operator] and timeline.resident_bytes[timestep] > budget_bytes
    ]
    seconds = min(SLOWEST * MOST_WORK, by_the_clock)
    # To state a program that is too large takes a second where there are thousands of gaps.
    if not beyond or seconds <= 0 or len(timeline.gaps) > MOST_COLUMNS:
        return None
    positions = {beyond[len(beyond) * part // APART] for part in range(1, APART)}
    positions.add(max(beyond, key=timeline.resident_bytes.__getitem__))
    if bound.operator is not None:
        positions.add(problem.order.index(bound.operator))
    moments = [moment_of_order(instance, position, budget_bytes) for position in sorted(positions)]
    program = ChoiceProgram(
        instance, makers_of_units(instance), moments, timeline.gaps, timeline.begins, link
    )
    if len(program.model.lower) > MOST_COLUMNS:
        return None
    solution = solve(program.model, time_limit=seconds, gap=CLOSE * COST_OF_STEP, work=MOST_WORK)
    return None if solution.values is None else program.swapped(solution.values)


def moment_of_order(instance: Instance, position: Timestep, budget_bytes: Bytes) -> Moment:
    """Return the first run of the operator at a position of the order.

    Args:
        instance: the step.
        position: the operator's.
        budget_bytes: of planned arrays and workspaces.
    """
    order = instance.problem.order
    has_run = [False] * len(order)
    for operator in order[:position]:
        has_run[operator] = True
    room = budget_bytes - own_bytes(instance, order[position])
    return Moment(order[position], room, has_run, [not ran for ran in has_run], position)


class ChoiceProgram(ResidencyProgram):
    """The program, and how to read its solution."""

    def __init__(
        self,
        instance: Instance,
        makers: Makers,
        moments: Sequence[Moment],
        gaps: Sequence[Gap],
        begins: Sequence[Seconds],
        link: Link,
    ) -> None:
        """State the program.

        Args:
            instance: the step.
            makers: what may run again.
            moments: one after the other, with their positions in the order.
            gaps: in which arrays may be on the host, between positions of the order and of the next step's.
            begins: seconds at which each position begins, and the end.
            link: which copies.
        """
        least_bytes = SMALL * instance.problem.lent_bytes
        self._gaps = [
            gap for gap in gaps if gap.array not in instance.problem.lent or gap.size_bytes >= least_bytes
        ]
        self._lent = instance.problem.lent
        self._gap_bytes = {gap.array: gap.size_bytes for gap in self._gaps}
        self._length = len(begins) - 1
        # Of this step and the next.
        self._begins = [*begins[:-1], *(begins[-1] + begin for begin in begins)]
        self._link = link
        self._away: list[dict[ArrayIndex, Column]] = []
        self._gap_of: dict[tuple[ArrayIndex, int], Gap] = {}
        super().__init__(instance, makers, moments)

    def swapped(self, values: Sequence[float]) -> list[Gap]:
        """Return the gaps in which a solution has arrays on the host.

        Args:
            values: of the solution's columns.
        """
        return sorted(
            {
                self._gap_of[array, at]
                for at, columns in enumerate(self._away)
                for array, column in columns.items()
                if values[column] > 0.5
            }
        )

    def _fit(self, at: int) -> None:
        """Have room for what is resident at a moment and not on the host."""
        moment = self._moments[at]
        away: dict[ArrayIndex, Column] = {}
        left: dict[ArrayIndex, tuple[Seconds, Seconds]] = {}
        for gap in self._gaps:
            position = gap.moment_of(moment.position, self._length)
            if position is None or not (gap.array in self._resident[at] or gap.array in self._lent):
                continue
            left[gap.array] = self._left(gap, position)
            if self._has_time(gap, *left[gap.array]):
                away[gap.array] = self.model.binary()
                self._gap_of[gap.array, at] = gap
                if gap.array in self._resident[at]:
                    is_there = self._resident[at][gap.array]
                    self.model.require(Expression([(away[gap.array], 1), (is_there, -1)]), "<=")
        self._away.append(away)
        there = Expression(
            (column, self._sizes[array] / BYTES_OF_UNIT) for array, column in self._resident[at].items()
        )
        for array, column in away.items():
            there.add(column, -self._gap_bytes[array] / BYTES_OF_UNIT)
        self.model.require(there, "<=", moment.room_bytes / BYTES_OF_UNIT)
        self._copy(away, left)

    def _left(self, gap: Gap, position: Timestep) -> tuple[Seconds, Seconds]:
        """Return the seconds that a gap leaves for copies out before a position, and in after it."""
        begins = self._begins
        return (
            begins[position] - begins[gap.out_after + 1],
            begins[gap.back_before] - begins[position + 1],
        )

    def _has_time(self, gap: Gap, out_left: Seconds, in_left: Seconds) -> bool:
        size = gap.size_bytes
        return self._link.out_seconds(size) <= out_left and self._link.in_seconds(size) <= in_left

    def _copy(
        self, away: Mapping[ArrayIndex, Column], left: Mapping[ArrayIndex, tuple[Seconds, Seconds]]
    ) -> None:
        """Have the copies out end before a moment, and those in begin after it and end in time."""
        for way, seconds_of in enumerate((self._link.out_seconds, self._link.in_seconds)):
            arrays = sorted(away, key=lambda array: left[array][way])
            taken = [seconds_of(self._gap_bytes[array]) for array in arrays]
            self._queue([away[array] for array in arrays], taken, [left[array][way] for array in arrays])

    def _queue(self, columns: Sequence[Column], taken: Sequence[Seconds], left: Sequence[Seconds]) -> None:
        """Have the first of some columns, however many, take no more seconds than are left for them."""
        scale = 1000.0 / max(self._begins[-1], 1e-30)
        sums = [self.model.column(0.0, scale * most) for most in left]
        for index, (column, seconds) in enumerate(zip(columns, taken, strict=True)):
            total = Expression([(sums[index], 1.0), (column, -scale * seconds)])
            if index:
                total.add(sums[index - 1], -1.0)
            self.model.require(total, "==")

    def _minimise(self) -> None:
        """Count the seconds of what runs again, and a little for what is swapped."""
        super()._minimise()
        seconds = self.model.objective
        total = sum(self._sizes) + self._problem.lent_bytes or 1
        cost = self.model.objective = self.model.column(0.0, self.model.upper[seconds] + COST_OF_SWAPS)
        terms = Expression([(cost, 1.0), (seconds, -1.0)])
        for columns in self._away:
            for array, column in columns.items():
                terms.add(column, -COST_OF_SWAPS * self._gap_bytes[array] / (total * len(self._away)))
        self.model.require(terms, ">=")
