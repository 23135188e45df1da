"""What a choice of dropped units costs and saves, and the sequence that it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from olla_solvers.effort.deadline import check_time
from olla_solvers.problem import Bytes, OperatorIndex, Timestep
from olla_solvers.recomputation.compiled import as_arrays, compiled_walk
from olla_solvers.recomputation.instance import MOST_RUNS, Flat, Instance
from olla_solvers.recomputation.problem import Execution, Recomputation, Seconds
from olla_solvers.recomputation.walk import (
    ALWAYS,
    KEPT,
    MOMENTS_FROM,
    MOST_MOMENTS,
    NEVER,
    ONCE,
    Trace,
    excess,
    walk,
)

States = list[int]
"""The state of each unit, see :mod:`olla_solvers.recomputation.walk`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One walk.

    Attributes:
        is_valid: False if a repetition would come too early, too late or too often.
        peak_bytes: most bytes alive at once.
        extra_seconds: of all repetitions.
        timesteps: operators and repetitions.
        versions: of all arrays.
    """

    is_valid: bool
    peak_bytes: Bytes
    extra_seconds: Seconds
    timesteps: int
    versions: int


class Evaluator:
    """Evaluates states of one step.

    Attributes:
        instance: the step.
        flat: the step in numbers, with the moments at which units may be dropped.
        walks: how many there were.
    """

    def __init__(self, instance: Instance, deadline: float = math.inf) -> None:
        """Make room for the longest sequence.

        Args:
            instance: the step.
            deadline: ``time.monotonic()`` after which nothing more is evaluated.
        """
        self.instance = instance
        self.flat = instance.flat
        self.walks = 0
        self._deadline = deadline
        self._trace: Trace | None = _room(instance.flat)
        self._arrays: Trace | None = None
        self._flat_arrays: Flat | None = None
        self._length = 0

    def compile(self) -> None:
        """Have numba compile the walks from now on, which pays for hundreds of them."""
        self._arrays = as_arrays(_room(self.instance.flat))

    @property
    def trace(self) -> Trace:
        """What the last walk wrote."""
        if self._trace is None:
            self._trace = Trace(*(numbers[: self._length].tolist() for numbers in self._arrays or ()))
        return self._trace

    def evaluate(self, states: Sequence[int]) -> Evaluation:
        """Walk the order with some units dropped; :attr:`trace` has the details until the next walk.

        Args:
            states: of each unit.

        Raises:
            DeadlinePassedError: if the deadline passed, and this is not the first walk.
        """
        if self.walks:
            check_time(self._deadline)
        return self._walk(states)

    def _walk(self, states: Sequence[int]) -> Evaluation:
        self.walks += 1
        if self._arrays is None or len(self.flat.moments) > MOST_MOMENTS:
            self._arrays = None
            self._trace = self._trace or _room(self.instance.flat)
            timesteps, versions, seconds = walk(self.flat, states, self._trace)
            resident = self._trace.timestep_bytes
        else:
            self._flat_arrays = self._flat_arrays or as_arrays(self.flat)
            run = compiled_walk()
            timesteps, versions, seconds = run(self._flat_arrays, np.array(states, np.int64), self._arrays)
            self._trace = None
            self._length = max(timesteps + 1, versions, len(states) + 1)
            resident = self._arrays.timestep_bytes
        if timesteps < 0:
            return Evaluation(False, 0, 0.0, 0, 0)
        return Evaluation(True, int(np.max(resident[:timesteps], initial=0)), seconds, timesteps, versions)

    def states_of(self, positions: Sequence[Timestep], dropped: Sequence[Sequence[int] | None]) -> States:
        """Return the states in which units are dropped at some moments.

        Args:
            positions: of the moments in the order.
            dropped: for each unit the places of the moments at which it is dropped; None for its plain state.
        """
        moments = list(self.flat.moments)
        moments += [position for position in positions if position not in moments]
        self.flat = self.flat._replace(moments=moments)
        self._flat_arrays = None
        bits = [1 << (MOMENTS_FROM + moments.index(position)) for position in positions]
        states = plain_states(self.instance)
        for unit, places in enumerate(dropped):
            if places is not None:
                states[unit] = sum(bits[place] for place in places)
        return states

    def states_from(self, other: Evaluator, states: Sequence[int]) -> States | None:
        """Return states of another order here, with moments in front of the same operators.

        Args:
            other: the evaluator of the order, which has the same units.
            states: of each unit.

        Returns:
            None if that would be more moments than compiled code has.
        """
        order = other.instance.problem.order
        here = {operator: position for position, operator in enumerate(self.instance.problem.order)}
        dropped = [_moments(state) for state in states]
        used = sorted({moment for moments in dropped for moment in moments})
        positions = [here[order[other.flat.moments[moment]]] for moment in used]
        if len({*self.flat.moments, *positions}) > MOST_MOMENTS:
            return None
        place_of = {moment: place for place, moment in enumerate(used)}
        translated = self.states_of(
            positions, [[place_of[moment] for moment in moments] for moments in dropped]
        )
        return [state if state <= ALWAYS else there for state, there in zip(states, translated, strict=True)]

    def for_compiled_code(self) -> tuple[Flat, Trace]:
        """Return the step in arrays, and a trace with room for the longest sequence."""
        return as_arrays(self.flat), as_arrays(_room(self.instance.flat))

    def excess(self, evaluation: Evaluation, budget_bytes: Bytes) -> float:
        """Return the bytes beyond a budget, summed over the timesteps of the last walk."""
        if self._trace is None and self._arrays is not None:
            beyond = self._arrays.timestep_bytes[: evaluation.timesteps] - budget_bytes
            return float(np.maximum(beyond, 0).sum())
        return excess(self.trace, evaluation.timesteps, budget_bytes)

    def recomputation(self, states: Sequence[int]) -> Recomputation:
        """Return the sequence that states stand for, which must be valid ones."""
        evaluation = self._walk(states)
        executed = [
            (int(self.trace.operator[timestep]), int(self.trace.copy[timestep]))
            for timestep in range(evaluation.timesteps)
        ]
        repeated = {operator for operator, copy in executed if copy}
        dropped = [
            array
            for unit, arrays in enumerate(self.instance.units.arrays)
            if not repeated.isdisjoint(self.instance.units.operators[unit])
            for array in arrays
        ]
        return Recomputation(
            self._with_sources(executed),
            int(evaluation.peak_bytes),
            float(evaluation.extra_seconds),
            tuple(sorted(dropped)),
        )

    def _with_sources(self, executed: Sequence[tuple[OperatorIndex, int]]) -> tuple[Execution, ...]:
        """Name for each run the repetitions that it reads: the newest, but none of its own phase."""
        problem, units = self.instance.problem, self.instance.units
        newest: dict[OperatorIndex, int] = {}
        unit_of = {operator: unit for unit, members in enumerate(units.operators) for operator in members}
        executions = []
        for operator, copy in executed:
            makers: set[OperatorIndex] = set()
            for array in (self.instance.reads if copy else self.instance.demands)[operator]:
                if units.of_array[array] >= 0:
                    makers.update(problem.makers[array])
            own = units.operators[unit_of[operator]] if copy else ()
            sources = sorted(
                (maker, newest[maker])
                for maker in makers
                # Of the unit that just runs, only what has run already in this run.
                if maker in newest and (maker not in own or newest[maker] == copy)
            )
            if copy:
                newest[operator] = copy
            executions.append(Execution(operator, copy, tuple(sources)))
        return tuple(executions)


def _moments(state: int) -> list[int]:
    """Return at which moments a unit in a state is dropped."""
    bits = state >> MOMENTS_FROM
    return [moment for moment in range(bits.bit_length()) if bits >> moment & 1]


def plain_states(instance: Instance) -> States:
    """Return the states without any repetition: what a later phase reads is kept.

    All else is dropped, so that what is made again makes it again, too, from what is kept.
    """
    states = [ONCE] * len(instance.units.arrays)
    for demanded in instance.demands:
        for array in demanded:
            states[instance.units.of_array[array]] = KEPT
    return states


def states_of(instance: Instance, repeated: Iterable[int], plain: States) -> States:
    """Return the states in which some units are made again once, and what they read of others is kept.

    Args:
        instance: the step.
        repeated: the units.
        plain: the states of all others, without any repetition.
    """
    repeated = set(repeated)
    states = list(plain)
    for unit in sorted(repeated):
        states[unit] = ONCE
        for read in instance.units.reads[unit]:
            if read not in repeated:
                states[read] = KEPT
    return states


def _room(flat: Flat) -> Trace:
    """Return lists for the longest walk."""
    arrays, units = len(flat.array_bytes), len(flat.latest)
    timesteps = len(flat.order) + MOST_RUNS * len(flat.unit_operators)
    made = sum(
        flat.made_starts[operator + 1] - flat.made_starts[operator] for operator in flat.unit_operators
    )
    taken = len(flat.taken_from) + MOST_RUNS * sum(
        flat.taken_starts[operator + 1] - flat.taken_starts[operator] for operator in flat.unit_operators
    )
    versions = arrays + MOST_RUNS * made
    return Trace(
        operator=[0] * timesteps,
        copy=[0] * timesteps,
        timestep_bytes=[0] * (timesteps + 1),
        array=[0] * versions,
        version_bytes=[0] * versions,
        first=[0] * versions,
        last_early=[0] * versions,
        first_late=[NEVER] * versions,
        last=[0] * versions,
        current=[0] * arrays,
        runs=[0] * units,
        demanded=[0] * units,
        stack_unit=[0] * (units + 1),
        stack_next=[0] * (units + 1),
        taken_at=[0] * taken,
        taken_from=[0] * taken,
        taken_by=[0] * taken,
        is_taken=[0] * versions,
        began=[0] * len(flat.order),
    )
