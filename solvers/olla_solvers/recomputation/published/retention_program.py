"""States the integer program over retention intervals: least seconds of repetitions within a budget of bytes.

In the manner of Checkmate, whose binaries say what runs again before each operator, and of Moccasin, which
counts by intervals of retention. The order is that of the problem. Before each late operator there is a
sequence of slots (:mod:`~olla_solvers.recomputation.published.slots`); a binary says of each whether its unit
runs there. Between two places that make or read an array, a column says whether it is retained. It is
continuous: once all runs are decided, retaining exactly what is read later is feasible if anything is.

**What the program allows.** Any number of repetitions of each unit, before any late operators, and retention
of any version of an array for any time. The slots contain every sequence in which the evaluator may make
units before an operator, and others. So no states of the evaluator take less time within the budget. There
are two exceptions, after which a program is not *complete*. Where the sequences are too many, each unit has
one slot, in the sequence of forward, as in Checkmate. And no unit runs again while an operator of forward has
still to read what it made first: keeping it till then costs nothing if it is one array, but may if it is
several of which others are needed.

**Bytes** are counted at every operator and repetition as the evaluator does: what is retained, what is made,
the workspace, less what is taken over in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from olla_solvers.ilp.model import Column, Expression, LinearModel, Sense
from olla_solvers.problem import ArrayKind, Bytes, OperatorIndex, Timestep
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Execution, Recomputation, Seconds
from olla_solvers.recomputation.published.sequence import numbered, run_operator, run_unit
from olla_solvers.recomputation.published.slots import TooManySlotsError, slots_for
from olla_solvers.recomputation.units import Unit

MOST_SLOTS = 10_000
"""Operators and slots; larger programs are not stated."""

COST_OF_STEP = 1000.0
"""Of the objective; so differences of a millionth of the step's time are well within solvers' tolerance."""


class TooLargeError(Exception):
    """Raised if a program would be too large; never leaves this package."""


Decision = Column | bool
"""A column, or what is decided beforehand."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in time at which a unit may run again, or an operator of the order runs.

    Attributes:
        position: of the operator in the order that runs here or next.
        unit: which may run; None for the operator of the order itself.
        runs: whether it does.
    """

    position: Timestep
    unit: Unit | None
    runs: Decision


@dataclass(frozen=True, slots=True)
class _Run:
    """One operator in a slot."""

    operator: OperatorIndex
    runs: Decision
    is_repetition: bool


@dataclass(frozen=True, slots=True)
class _Event:
    """A place in the sequence of runs that makes or reads an array, and whether it is retained after it."""

    place: int
    makes: bool
    after: Decision


@dataclass(frozen=True, slots=True)
class _Takeover:
    """The array made at a place takes the memory of the one read, if the column is 1."""

    column: Column
    place: int
    read: ArrayIndex
    made: ArrayIndex


class RetentionProgram:
    """The program, and what is needed to read and to start it.

    Attributes:
        model: minimises the seconds of repetitions, as thousandths of the step's.
        slots: in sequence.
        is_complete: whether they contain all sequences that the evaluator may use.
    """

    def __init__(self, instance: Instance, budget_bytes: Bytes) -> None:
        """State the program.

        Args:
            instance: the step.
            budget_bytes: peak that is allowed.

        Raises:
            TooLargeError: if it would have too many slots.
        """
        self.model = LinearModel()
        self._instance = instance
        self._cost = self.model.column(0, 0)
        self.model.objective = self._cost
        self.slots = list(self._make_slots())
        self._runs = list(self._runs_of_slots())
        self._takeovers: list[_Takeover] = []
        self._events = {
            array: self._events_of(array)
            for array, described in enumerate(instance.problem.problem.arrays)
            if described.kind is ArrayKind.PLANNED
        }
        self._count_cost()
        self._count_bytes(budget_bytes)

    @property
    def step_seconds(self) -> Seconds:
        """Return the seconds of the step without repetitions; 1 if it takes none."""
        return self._instance.problem.step_seconds or 1.0

    @property
    def cost_of_second(self) -> float:
        """Return the factor between seconds and the objective."""
        return COST_OF_STEP / self.step_seconds

    def decode(self, values: Sequence[float]) -> list[Execution]:
        """Return the sequence of a solution.

        Args:
            values: of the columns.
        """
        newest = [0] * len(self._instance.units.arrays)
        executions: list[Execution] = []
        for slot in self.slots:
            if slot.unit is None:
                operator = self._instance.problem.order[slot.position]
                executions.append(run_operator(self._instance, operator, newest.__getitem__))
            elif values[slot.runs] > 0.5:
                copy = newest[slot.unit] + 1
                executions += run_unit(self._instance, slot.unit, copy, newest.__getitem__)
                newest[slot.unit] = copy
        return numbered(executions)

    def start_from(self, plan: Recomputation) -> bool:
        """Hand a known plan to the solver.

        Args:
            plan: one within the budget.

        Returns:
            False if the plan has a sequence that the slots do not have.
        """
        used = self._slots_used(plan)
        if used is None:
            return False
        start, seconds = self.model.start, 0.0
        for place, slot in enumerate(self.slots):
            if slot.unit is not None:
                start[slot.runs] = float(place in used)
                seconds += self._instance.units.seconds[slot.unit] * (place in used)
        for events in self._events.values():
            self._retain_what_is_read(events)
        given: set[tuple[int, str, ArrayIndex]] = set()
        for takeover in self._takeovers:
            roles = {(takeover.place, "read", takeover.read), (takeover.place, "made", takeover.made)}
            runs = self._started(self._runs[takeover.place].runs)
            is_last = not self._started(self._after(takeover.place, takeover.read))
            start[takeover.column] = float(runs and is_last and given.isdisjoint(roles))
            if start[takeover.column]:
                given |= roles
        start[self._cost] = self.cost_of_second * seconds
        return True

    def _make_slots(self) -> Iterator[Slot]:
        instance, count = self._instance, 0
        last_early = [self._last_early(unit) for unit in range(len(instance.units.arrays))]
        useful_until = self._useful_until()
        self.is_complete = not any(map(self._waits_in_part, range(len(last_early)), last_early))
        for position, operator in enumerate(instance.problem.order):
            if instance.problem.phases[operator]:
                runnable = {
                    unit
                    for unit, last in enumerate(last_early)
                    if last < position <= min(instance.units.latest[unit], useful_until[unit])
                }
                units = self._units_before(operator, runnable)
                count += len(units)
                for unit in units:
                    yield Slot(position, unit, self.model.binary())
            yield Slot(position, None, True)
            count += 1
            if count > MOST_SLOTS:
                raise TooLargeError

    def _units_before(self, operator: OperatorIndex, runnable: set[Unit]) -> list[Unit]:
        """Return the sequence of units that may run before an operator."""
        instance = self._instance
        demanded = [instance.units.of_array[array] for array in instance.reads[operator]]
        wanted = [unit for unit in dict.fromkeys(demanded) if unit >= 0]
        try:
            needed = slots_for(wanted, instance.units.reads, runnable.__contains__)
            # What is of no use to this operator may run early, after the others.
            wanted += sorted(runnable.difference(needed))
            return slots_for(wanted, instance.units.reads, runnable.__contains__)
        except TooManySlotsError:
            self.is_complete = False
            return sorted(runnable, key=lambda unit: instance.units.earliest[unit])

    def _last_early(self, unit: Unit) -> Timestep:
        """Return the last timestep at which its own phase makes or reads a unit's arrays."""
        problem = self._instance.problem
        arrays = [problem.problem.arrays[array] for array in self._instance.units.arrays[unit]]
        phase = self._instance.phase_of(unit)
        readers = {reader for array in arrays for reader in array.consumers}
        involved = {reader for reader in readers if problem.phases[reader] == phase}
        involved.update(self._instance.units.operators[unit])
        return max(position for position, operator in enumerate(problem.order) if operator in involved)

    def _waits_in_part(self, unit: Unit, last_early: Timestep) -> bool:
        """Return True if some arrays of a unit may be wanted again while its phase has to read others."""
        instance = self._instance
        waiting = instance.problem.order[instance.units.earliest[unit] : last_early + 1]
        phases, phase = instance.problem.phases, instance.phase_of(unit)
        return len(instance.units.arrays[unit]) > 1 and any(phases[operator] > phase for operator in waiting)

    def _useful_until(self) -> list[Timestep]:
        """Return for each unit the last position at which it, or what is made of it, is read; -1 if never."""
        instance = self._instance
        until = [-1] * len(instance.units.arrays)
        for position, operator in enumerate(instance.problem.order):
            for array in instance.demands[operator]:
                until[instance.units.of_array[array]] = position
        todo = list(range(len(until)))
        for unit in todo:
            for read in instance.units.reads[unit]:
                if until[read] < until[unit]:
                    until[read] = until[unit]
                    todo.append(read)
        return until

    def _runs_of_slots(self) -> Iterator[_Run]:
        for slot in self.slots:
            if slot.unit is None:
                yield _Run(self._instance.problem.order[slot.position], True, False)
            else:
                for operator in self._instance.units.operators[slot.unit]:
                    yield _Run(operator, slot.runs, True)

    def _events_of(self, array: ArrayIndex) -> list[_Event]:
        """State when an array is retained."""
        made_again = self._instance.units.of_array[array] >= 0
        involved: list[tuple[int, bool]] = []
        for place, run in enumerate(self._runs):
            if array in self._instance.makes[run.operator] and (made_again or not run.is_repetition):
                involved.append((place, True))
            elif array in self._instance.reads[run.operator]:
                involved.append((place, False))
        last_certain = self._last_certain(array, involved)
        events: list[_Event] = []
        before: Decision = False
        for index, (place, makes) in enumerate(involved):
            after: Decision = index < last_certain
            if last_certain <= index < len(involved) - 1:
                after = self.model.column(0, 1)
            self._require_event(before, self._runs[place].runs, after, makes=makes)
            events.append(_Event(place, makes, after))
            before = after
        return events

    def _last_certain(self, array: ArrayIndex, involved: Sequence[tuple[int, bool]]) -> int:
        """Return the last event until which the first version is retained in any case."""
        return max(
            index
            for index, (place, makes) in enumerate(involved)
            if self._runs[place].runs is True
            and (makes or array not in self._instance.demands[self._runs[place].operator])
        )

    def _require_event(self, before: Decision, runs: Decision, after: Decision, *, makes: bool) -> None:
        """State what an event requires: what is read is there; what is there was there, or is made."""
        if makes:
            # It is not made while it is there.
            self._require([(before, 1), (runs, 1)], "<=", 1)
            self._require([(after, 1), (before, -1), (runs, -1)], "<=", 0)
        else:
            self._require([(before, 1), (runs, -1)], ">=", 0)
            self._require([(after, 1), (before, -1)], "<=", 0)

    def _require(self, terms: Sequence[tuple[Decision, float]], sense: Sense, right: float) -> None:
        expression = Expression()
        for decision, factor in terms:
            _add(expression, decision, factor)
        self.model.require(expression, sense, right)

    def _count_cost(self) -> None:
        cost = Expression([(self._cost, -1)])
        most = 0.0
        for slot in self.slots:
            if slot.unit is not None:
                seconds = self.cost_of_second * self._instance.units.seconds[slot.unit]
                cost.add(slot.runs, seconds)
                most += seconds
        self.model.upper[self._cost] = most
        self.model.require(cost, "<=", 0)

    def _count_bytes(self, budget_bytes: Bytes) -> None:
        """State that no run needs more than the budget; what is lent is there all the time."""
        budget_bytes -= self._instance.problem.lent_bytes
        arrays = self._instance.problem.problem.arrays
        workspaces = [operator.workspace_bytes for operator in self._instance.problem.problem.operators]
        unit_bytes = math.gcd(*(array.size_bytes for array in arrays), *workspaces) or 1
        resident = [Expression() for _ in self._runs]
        for array, events in self._events.items():
            for event, following in pairwise(events):
                for place in range(event.place + 1, following.place + 1):
                    _add(resident[place], event.after, arrays[array].size_bytes // unit_bytes)
        for place, (run, expression) in enumerate(zip(self._runs, resident, strict=True)):
            made = sum(
                arrays[array].size_bytes
                for array in self._instance.makes[run.operator]
                if run.is_repetition or arrays[array].kind is ArrayKind.PLANNED
            )
            _add(expression, run.runs, (made + workspaces[run.operator]) // unit_bytes)
            self._subtract(place, expression, unit_bytes)
            self.model.require(expression, "<=", budget_bytes // unit_bytes)

    def _subtract(self, place: int, resident: Expression, unit_bytes: Bytes) -> None:
        """Take away what needs no memory of its own at a place, though it is retained or made there."""
        self._take_over(place, resident, unit_bytes)

    def _take_over(self, place: int, resident: Expression, unit_bytes: Bytes) -> None:
        """Let results take the memory of what is read for the last time."""
        flat, run = self._instance.flat, self._runs[place]
        taken: dict[tuple[str, ArrayIndex], list[tuple[Decision, float]]] = {}
        for pair in range(flat.taken_starts[run.operator], flat.taken_starts[run.operator + 1]):
            read, made = flat.taken_from[pair], flat.taken_by[pair]
            after = self._after(place, read)
            if after is True:
                continue
            column = self.model.column(0, 1)
            self._takeovers.append(_Takeover(column, place, read, made))
            resident.add(column, -(flat.array_bytes[read] // unit_bytes))
            self._require([(column, 1), (after, 1)], "<=", 1)
            for role in (("read", read), ("made", made)):
                taken.setdefault(role, []).append((column, 1))
        for columns in taken.values():
            self._require([*columns, (run.runs, -1)], "<=", 0)

    def _after(self, place: int, array: ArrayIndex) -> Decision:
        """Return whether an array is retained after one of its events."""
        return next(event.after for event in self._events[array] if event.place == place)

    def _slots_used(self, plan: Recomputation) -> set[int] | None:
        """Return the places of the slots in which a plan's operators run."""
        used: set[int] = set()
        first_of = {members[0]: unit for unit, members in enumerate(self._instance.units.operators)}
        slots = enumerate(self.slots)
        for execution in plan.executions:
            unit = first_of.get(execution.operator) if execution.copy else None
            if execution.copy and unit is None:
                continue
            for place, slot in slots:
                if slot.unit == unit:
                    used.add(place)
                    break
                if slot.unit is None:
                    return None
        return used

    def _retain_what_is_read(self, events: Sequence[_Event]) -> None:
        """Set the start of an array's columns, from its last event to its first."""
        needed = False
        for event in reversed(events):
            if not isinstance(event.after, bool):
                self.model.start[event.after] = float(needed)
            if self._started(self._runs[event.place].runs):
                needed = not event.makes

    def _started(self, decision: Decision) -> bool:
        """Return a decision in the start."""
        return decision if isinstance(decision, bool) else bool(self.model.start[decision])


def _add(expression: Expression, decision: Decision, factor: float) -> None:
    if not isinstance(decision, bool):
        expression.add(decision, factor)
    elif decision:
        expression.add(None, factor)
