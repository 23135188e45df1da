"""States the integer program of what is made, retained and fetched: least seconds in a budget with a link.

The program over retention intervals (:mod:`olla_solvers.recomputation.published.retention_program`) says what
runs where and what is retained, as OLLA's create and preserve do. Here a binary more says of each array and
each place whether it is on the host meanwhile: *away*. That takes no memory, but time:

* Each place has a boundary, when what is away from there on was copied out, and a beginning, when what is
  read there was copied in, too. Boundary, beginning and the end of the run before follow each other.
* An array is copied out after the last run that accesses it before it is away; of two, the one that was
  accessed first is copied first, as the simulator has it, and one that is copied next begins after its end.
* It is copied in after the boundary at which it is not away any more, in any sequence with others.

The cost is the end of the last run, so it has all stalls. Each array is away once at most, in any version;
what is lent never is. So
the program contains every plan of :mod:`olla_solvers.swapping.least_time` with at most one transfer of each
array, if the program over retention intervals is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

from olla_solvers.ilp.model import Column, Expression
from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Execution, Seconds
from olla_solvers.recomputation.published.retention_program import RetentionProgram
from olla_solvers.recomputation.published.sequence import versions_read
from olla_solvers.swapping.transfers import Link, Transfer

_Terms = Sequence[tuple[Column | bool, float]]


@dataclass(frozen=True)
class _StayColumns:
    """The columns of one array's stay on the host.

    Attributes:
        away: for each place at which it can be away.
        goes: for each place whether it is away from there on.
        returns: for each place whether it is there again from there on.
        out_after: for each of its events whether it is the last access before.
        out_place: of that event.
        out_start: of the copy out, and its seconds.
        in_start: of the copy in, and its seconds.
    """

    away: dict[int, Column]
    goes: dict[int, Column]
    returns: dict[int, Column]
    out_after: dict[int, Column]
    out_place: Column
    out_start: tuple[Column, float]
    in_start: tuple[Column, float]


class FetchProgram(RetentionProgram):
    """The program, and what is needed to read it."""

    def __init__(self, instance: Instance, budget_bytes: Bytes, link: Link) -> None:
        """State the program.

        Args:
            instance: the step.
            budget_bytes: peak that is allowed.
            link: which copies.

        Raises:
            TooLargeError: if it would have too many slots.
        """
        self._link = link
        self._stays: dict[ArrayIndex, _StayColumns] = {}
        super().__init__(instance, budget_bytes)

    def transfers(self, values: Sequence[float], executions: Sequence[Execution]) -> list[Transfer]:
        """Return the transfers of a solution.

        Args:
            values: of the columns.
            executions: of the same solution.
        """
        ran = [
            int(run.runs is True or (run.runs is not False and values[run.runs] > 0.5)) for run in self._runs
        ]
        # The first execution at a place or after it.
        timestep = [0, *accumulate(ran)]
        by_copy_in: list[tuple[Seconds, Transfer]] = []
        for array, stay in self._stays.items():
            away = [place for place, column in stay.away.items() if values[column] > 0.5]
            if not away:
                continue
            accesses = [event.place for event in self._events[array] if ran[event.place]]
            before = [place for place in accesses if place < away[0]]
            after = [place for place in accesses if place > away[-1]]
            gone, back = timestep[away[0]], timestep[away[-1] + 1]
            if not before or not after or gone >= back:
                continue
            out_after, back_before = timestep[before[-1]], timestep[after[0]]
            copy = _copy(self._instance, executions[back_before], array)
            transfer = Transfer(out_after, max(gone, out_after + 1), back, back_before, array, copy)
            by_copy_in.append((values[stay.in_start[0]], transfer))
        return _in_sequence(by_copy_in)

    def _count_cost(self) -> None:
        """Count the seconds up to the end of the last run."""
        link, problem, scale = self._link, self._instance.problem, self.cost_of_second
        self._taken = [
            scale * (problem.repetition_seconds if run.is_repetition else problem.seconds)[run.operator]
            for run in self._runs
        ]
        arrays = problem.problem.arrays
        swapped = [array for array in self._events if arrays[array].size_bytes]
        copies = {
            array: (
                scale * link.out_seconds(arrays[array].size_bytes),
                scale * link.in_seconds(arrays[array].size_bytes),
            )
            for array in swapped
        }
        self._horizon = sum(self._taken) + sum(map(sum, copies.values()))
        self._boundary = [self._moment() for _ in self._runs]
        self._begin = [self._moment() for _ in self._runs]
        self.model.upper[self._cost] = self._horizon
        for place in range(len(self._runs)):
            self._require([(self._begin[place], 1), (self._boundary[place], -1)], ">=", 0)
            if place:
                self._after_run(self._boundary[place], place - 1)
        plain = scale * problem.step_seconds
        last = len(self._runs) - 1
        self._require(
            [(self._cost, 1), (self._begin[last], -1), (self._runs[last].runs, -self._taken[last])],
            ">=",
            -plain,
        )
        for array in swapped:
            self._add_stay(array, *copies[array])
        for first, second in combinations(self._stays.values(), 2):
            self._copy_in_turn(first, second)

    def _moment(self) -> Column:
        return self.model.column(0.0, self._horizon)

    def _after_run(self, column: Column, place: int, *, unless: _Terms = ()) -> None:
        """Have a time be after the end of a run."""
        terms = [(column, 1.0), (self._begin[place], -1.0), (self._runs[place].runs, -self._taken[place])]
        self._not_before(terms, unless)

    def _not_before(self, terms: _Terms, unless: _Terms = (), right: float = 0.0) -> None:
        """Have terms be at least a number unless a column, times its sign, is less than one."""
        # Each of them that is 0 lifts the bound by the horizon.
        expression = [*terms]
        for column, weight in unless:
            expression.append((column, -weight * self._horizon))
            right -= self._horizon
        self._require(expression, ">=", right)

    def _add_stay(self, array: ArrayIndex, out_seconds: float, in_seconds: float) -> None:
        """State when an array may be away, and that its copies take their time."""
        events, model = self._events[array], self.model
        runs_at = {event.place: self._runs[event.place].runs for event in events}
        away: dict[int, Column] = {}
        for event, following in pairwise(events):
            for place in range(event.place + 1, following.place + 1):
                if event.after is False or runs_at.get(place) is True:
                    continue
                away[place] = model.binary()
                self._require([(away[place], 1), (event.after, -1)], "<=", 0)
                if place in runs_at:
                    self._require([(away[place], 1), (runs_at[place], 1)], "<=", 1)
        if not away:
            return
        goes, returns = self._changes(away)
        out_after = {event.place: model.binary() for event in events}
        stay = _StayColumns(
            away,
            goes,
            returns,
            out_after,
            model.column(0, len(self._runs)),
            (self._moment(), out_seconds),
            (self._moment(), in_seconds),
        )
        self._stays[array] = stay
        # Away once at most, after one access.
        self._require([(column, 1) for column in goes.values()], "<=", 1)
        chosen = [(column, 1.0) for column in out_after.values()]
        self._require([*chosen, *((column, -1.0) for column in goes.values())], "==", 0)
        self._require(
            [(stay.out_place, 1), *((column, -place) for place, column in out_after.items())], "==", 0
        )
        for place, column in out_after.items():
            self._require([(column, 1), (runs_at[place], -1)], "<=", 0)
            self._after_run(stay.out_start[0], place, unless=[(column, 1)])
        self._copy_out(stay, runs_at)
        self._copy_in(stay, runs_at)

    def _changes(self, away: dict[int, Column]) -> tuple[dict[int, Column], dict[int, Column]]:
        """Return columns that say at which places an array goes and returns."""
        goes: dict[int, Column] = {}
        returns: dict[int, Column] = {}
        for place in sorted({*away, *(place + 1 for place in away)}):
            goes[place], returns[place] = self.model.column(0, 1), self.model.column(0, 1)
            self._require(
                [
                    (goes[place], 1),
                    (returns[place], -1),
                    (away.get(place, False), -1),
                    (away.get(place - 1, False), 1),
                ],
                "==",
                0,
            )
        return goes, returns

    def _copy_out(self, stay: _StayColumns, runs_at: dict[int, Column | bool]) -> None:
        """Have an array be away after its copy out, which is after its last access."""
        places = len(self._runs)
        start, seconds = stay.out_start
        for gone, column in stay.goes.items():
            if gone >= places:
                continue
            self._not_before([(self._boundary[gone], 1), (start, -1)], [(column, 1)], seconds)
            for place, runs in runs_at.items():
                if place >= gone:
                    self._require([(column, 1), (stay.out_after[place], 1)], "<=", 1)
                    continue
                # The last access is none before another one.
                terms = [(stay.out_place, 1.0), (runs, -float(places)), (column, -float(places))]
                self._require(terms, ">=", place - 2 * places)

    def _copy_in(self, stay: _StayColumns, runs_at: dict[int, Column | bool]) -> None:
        """Have an array be read after its copy in, which is after its memory is there."""
        start, seconds = stay.in_start
        for back, column in stay.returns.items():
            if back >= len(self._runs):
                continue
            self._not_before([(start, 1), (self._boundary[back], -1)], [(column, 1)])
            for place, runs in runs_at.items():
                if place >= back:
                    unless = [(column, 1.0), (runs, 1.0)]
                    self._not_before([(self._begin[place], 1), (start, -1)], unless, seconds)

    def _copy_in_turn(self, first: _StayColumns, second: _StayColumns) -> None:
        """Have two arrays' copies come one after the other, those out in the sequence of accesses."""
        used = [(column, 1.0) for stay in (first, second) for column in stay.goes.values()]
        for is_out in (True, False):
            earlier = self.model.binary()
            pairs = ((first, second, 1.0), (second, first, -1.0))
            for one, other, sign in pairs:
                (start, seconds), (following, _) = (
                    (one.out_start, other.out_start) if is_out else (one.in_start, other.in_start)
                )
                # Unless the other one comes first, or one of them is never away.
                terms: list[tuple[Column | bool, float]] = [(following, 1.0), (start, -1.0)]
                terms += [(column, -weight * self._horizon) for column, weight in used]
                terms.append((earlier, -sign * self._horizon))
                right = seconds - (3 if sign > 0 else 2) * self._horizon
                self._require(terms, ">=", right)
                if is_out:
                    self._in_order_of_access(one, other, earlier, sign, used)

    def _in_order_of_access(
        self, one: _StayColumns, other: _StayColumns, earlier: Column, sign: float, used: _Terms
    ) -> None:
        """Have an array whose last access is before another's come first."""
        places = float(len(self._runs))
        terms: list[tuple[Column | bool, float]] = [(other.out_place, 1.0), (one.out_place, -1.0)]
        terms += [(column, places * weight) for column, weight in used]
        terms.append((earlier, -sign * places))
        self._require(terms, "<=", (2 if sign > 0 else 3) * places)

    def _subtract(self, place: int, resident: Expression, unit_bytes: Bytes) -> None:
        super()._subtract(place, resident, unit_bytes)
        arrays = self._instance.problem.problem.arrays
        for array, stay in self._stays.items():
            if place in stay.away:
                resident.add(stay.away[place], -(arrays[array].size_bytes // unit_bytes))


def _copy(instance: Instance, execution: Execution, array: ArrayIndex) -> int:
    """Return the copy of an array that an execution reads."""
    return dict(versions_read(instance, execution)).get(array, execution.copy)


def _in_sequence(by_copy_in: list[tuple[Seconds, Transfer]]) -> list[Transfer]:
    """Return transfers in the sequence of their copies in, which are asked for in that sequence, too."""
    result: list[Transfer] = []
    latest: Timestep = 0
    for _, transfer in sorted(by_copy_in):
        latest = max(latest, transfer.back_from)
        back = min(latest, transfer.back_before)
        result.append(
            Transfer(
                transfer.out_after,
                transfer.gone_before,
                back,
                transfer.back_before,
                transfer.array,
                transfer.copy,
            )
        )
    return result
