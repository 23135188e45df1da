"""States the integer program of what is resident at some operators: least seconds of repetitions in a budget.

*Moments* are the first runs of operators b_1, ..., b_n, one after the other. A binary says of each array
whether it is resident at a moment, another of each maker whether it runs again between two moments, or after
the last:

* the arrays resident at a moment fit beside the results of its operator;
* an array is resident at a moment only if it was at the one before, or is made in between;
* what runs between two moments, for the first time or again, reads what is resident at the first one, or made
  after it; b_i reads what is resident at b_i.

Bytes are counted at the moments alone, and a maker runs again once between two of them, at most. So the
program's optimum is a bound, of all orders in which the moments come in this sequence, or of one order. The
coarse stages between moments are what distinguishes it from the programs of Checkmate (Jain et al., 2020),
whose stages are single operators: few moments tell nearly as much, and take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from olla_solvers.ilp.model import Column, Expression, LinearModel
from olla_solvers.problem import Bytes, OperatorIndex, Timestep
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds

COST_OF_STEP = 1000.0
"""Of the objective; so differences of a millionth of the step's time are well within solvers' tolerance."""

BYTES_OF_UNIT = float(1 << 20)
"""In which rooms are stated, so that coefficients are of similar magnitude."""

Maker = int


@dataclass(frozen=True)
class Makers:
    """What may run again: single operators, or units of them.

    Attributes:
        of_array: for each array what has to run to make it again; empty if nothing can.
        reads: for each maker the arrays that it reads.
        seconds: of a repetition of each.
        operators: for each maker the last of its operators.
        latest: for each maker the last timestep of an order before which it can run again.
    """

    of_array: Sequence[Sequence[Maker]]
    reads: Sequence[Collection[ArrayIndex]]
    seconds: Sequence[Seconds]
    operators: Sequence[OperatorIndex]
    latest: Sequence[Timestep]


@dataclass(frozen=True)
class Moment:
    """The first run of an operator.

    Attributes:
        operator: which.
        room_bytes: for arrays that are resident.
        has_run: for each operator True if it has run before in any case.
        is_to_come: for each operator True if it cannot have run; true of the moment's own.
        position: in the order, or 0 if any order is meant.
        elsewhere: arrays that take no room if they are kept.
    """

    operator: OperatorIndex
    room_bytes: Bytes
    has_run: Sequence[bool]
    is_to_come: Sequence[bool]
    position: Timestep = 0
    elsewhere: Collection[ArrayIndex] = ()


_NEVER = -1
"""Stands for the column of a maker that does not exist."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """An array must be resident at a moment or made after it, if a column is 1; None if in any case."""

    at: int
    array: ArrayIndex
    column: Column | None


class ResidencyProgram:
    """The program, and how to read its solution.

    Attributes:
        model: minimises the seconds of repetitions, as thousandths of the step's.
    """

    def __init__(self, instance: Instance, makers: Makers, moments: Sequence[Moment]) -> None:
        """State the program.

        Args:
            instance: the step.
            makers: what may run again.
            moments: one after the other.
        """
        self.model = LinearModel()
        self._problem = instance.problem
        self._reads = instance.reads
        self._makers = makers
        self._moments = moments
        self._producers = [array.producer for array in instance.problem.problem.arrays]
        self._sizes = [
            0 if producer is None else size
            for producer, size in zip(self._producers, instance.flat.array_bytes, strict=True)
        ]
        self._resident: list[dict[ArrayIndex, Column]] = [{} for _ in moments]
        self._runs: list[dict[Maker, Column]] = [{} for _ in moments]
        self._demands: list[_Demand] = []
        for at, moment in enumerate(moments):
            self._read_at(at, moment.operator)
        for operator in range(len(self._reads)):
            self._read_between(operator)
        for demand in self._demands:
            # What is demanded first demands more in turn.
            self._meet(demand)
        for at in range(len(moments)):
            self._fit(at)
        self._minimise()

    def resident(self, values: Sequence[float], at: int) -> set[ArrayIndex]:
        """Return the arrays that a solution keeps resident at a moment.

        Args:
            values: of the solution's columns.
            at: the moment's place.
        """
        return {array for array, column in self._resident[at].items() if values[column] > 0.5}

    def resident_bytes(self, values: Sequence[float], at: int) -> Bytes:
        """Return the bytes of these arrays.

        Args:
            values: of the solution's columns.
            at: the moment's place.
        """
        resident = self.resident(values, at).difference(self._moments[at].elsewhere)
        return sum(self._sizes[array] for array in resident)

    def runs(self, values: Sequence[float], at: int) -> set[Maker]:
        """Return the makers that run again between a moment and the next.

        Args:
            values: of the solution's columns.
            at: the moment's place.
        """
        return {maker for maker, column in self._runs[at].items() if values[column] > 0.5}

    def mentions(self, array: ArrayIndex) -> bool:
        """Return True if it is decided of an array whether it is resident."""
        return any(array in resident for resident in self._resident)

    def _read_at(self, at: int, operator: OperatorIndex) -> None:
        """Have resident what a moment's operator reads."""
        for array in self._counted(operator):
            if not self._is_made_after(at, array):
                column = self._resident_at(at, array)
                self.model.lower[column] = 1.0

    def _read_between(self, operator: OperatorIndex) -> None:
        """Have available what an operator reads that runs for the first time after a moment."""
        moments = self._moments
        if any(moment.operator == operator for moment in moments):
            return
        after = [at for at, moment in enumerate(moments) if moment.is_to_come[operator]]
        if not after:
            return
        first = after[-1]
        before = (at for at in range(first + 1, len(moments)) if moments[at].has_run[operator])
        places = range(first, next(before, len(moments)))
        reads = [array for array in self._counted(operator) if self._is_last_version(operator, array)]
        if len(places) == 1 or not reads:
            self._demands += [_Demand(first, array, None) for array in reads]
            return
        runs = [(self.model.binary(), at) for at in places]
        self.model.require(Expression([(column, 1) for column, _ in runs]), "==", 1)
        self._demands += [_Demand(at, array, column) for column, at in runs for array in reads]

    def _is_last_version(self, operator: OperatorIndex, array: ArrayIndex) -> bool:
        # A reader of the same phase may read what a later maker has not written over yet.
        phases, producer = self._problem.phases, self._producers[array]
        return len(self._problem.makers[array]) < 2 or producer is None or phases[operator] > phases[producer]

    def _counted(self, operator: OperatorIndex) -> list[ArrayIndex]:
        return [array for array in self._reads[operator] if self._sizes[array]]

    def _is_made_after(self, at: int, array: ArrayIndex) -> bool:
        producer = self._producers[array]
        return producer is not None and self._moments[at].is_to_come[producer]

    def _meet(self, demand: _Demand) -> None:
        """Have an array resident at a moment or made after it, if the column says that it is demanded."""
        at, array = demand.at, demand.array
        producer = self._producers[array]
        if producer is None or self._moments[at].is_to_come[producer]:
            return
        makers = self._makers.of_array[array]
        if not makers and not self._moments[at].has_run[producer]:
            makers = (producer,)
        resident = self._resident_at(at, array)
        for run in [self._runs_after(at, maker) for maker in makers] or [_NEVER]:
            if run is not None:
                columns = (resident,) if run == _NEVER else (resident, run)
                available = Expression([(column, 1) for column in columns])
                available.add(demand.column, -1)
                self.model.require(available, ">=")

    def _resident_at(self, at: int, array: ArrayIndex) -> Column:
        columns = self._resident[at]
        if array not in columns:
            columns[array] = self.model.binary()
            if at:
                self._demands.append(_Demand(at - 1, array, columns[array]))
        return columns[array]

    def _runs_after(self, at: int, maker: Maker) -> Column | None:
        """Return whether a maker runs between a moment and the next; None if it does in any case."""
        if self._moments[at].is_to_come[self._makers.operators[maker]]:
            return None
        columns = self._runs[at]
        if maker not in columns:
            columns[maker] = self.model.binary()
            if self._makers.latest[maker] < self._moments[at].position:
                self.model.upper[columns[maker]] = 0.0
            self._demands += [
                _Demand(at, array, columns[maker])
                for array in self._makers.reads[maker]
                if self._sizes[array] and maker not in self._makers.of_array[array]
            ]
        return columns[maker]

    def _fit(self, at: int) -> None:
        """Have room for what is resident at a moment."""
        resident = Expression(
            (column, self._sizes[array] / BYTES_OF_UNIT)
            for array, column in self._resident[at].items()
            if array not in self._moments[at].elsewhere
        )
        self.model.require(resident, "<=", self._moments[at].room_bytes / BYTES_OF_UNIT)

    def _minimise(self) -> None:
        """Count the seconds of what runs again."""
        scale = COST_OF_STEP / max(self._problem.step_seconds, 1e-30)
        costs = [
            # What has not run by then runs for the first time.
            (column, scale * self._makers.seconds[maker])
            for moment, runs in zip(self._moments, self._runs, strict=True)
            for maker, column in runs.items()
            if moment.has_run[self._makers.operators[maker]]
        ]
        cost = self.model.objective = self.model.column(0.0, sum(factor for _, factor in costs))
        terms = Expression((column, -factor) for column, factor in costs)
        terms.add(cost, 1.0)
        self.model.require(terms, ">=")


def makers_of_units(instance: Instance) -> Makers:
    """Return the units of a step: what the evaluator makes again together."""
    units = instance.units
    return Makers(
        of_array=[() if unit < 0 else (unit,) for unit in units.of_array],
        reads=[
            {array for operator in operators for array in instance.reads[operator]}
            for operators in units.operators
        ],
        seconds=units.seconds,
        operators=[operators[-1] for operators in units.operators],
        latest=units.latest,
    )


def makers_of_operators(instance: Instance) -> Makers:
    """Return the operators of a step, each by itself."""
    problem = instance.problem
    return Makers(
        of_array=problem.makers,
        reads=instance.reads,
        seconds=problem.repetition_seconds,
        operators=range(len(instance.reads)),
        latest=[len(problem.order)] * len(instance.reads),
    )
