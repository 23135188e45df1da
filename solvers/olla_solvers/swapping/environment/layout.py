"""The sequence of a step in which some units are removed and made again, and who accesses what in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from olla_solvers.problem import OperatorIndex, Timestep
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.recomputation.units import Unit
from olla_solvers.recomputation.walk import ONCE

Numbers = np.ndarray[Any, np.dtype[np.int64]]
"""A number for each timestep."""


@dataclass(frozen=True)
class Layout:
    """A sequence with repetitions.

    Attributes:
        seconds: of each timestep.
        resident_bytes: of each timestep, if nothing is swapped.
        timestep_of: for each position of the plain order the timestep of its operator.
        runs_of: for each operator the timesteps at which it runs, its repetitions included.
        repeated: the units that run again.
    """

    seconds: tuple[Seconds, ...]
    resident_bytes: Numbers
    timestep_of: tuple[Timestep, ...]
    runs_of: tuple[tuple[Timestep, ...], ...]
    repeated: frozenset[Unit]


def removed_states(instance: Instance, removed: Iterable[Unit]) -> list[int]:
    """Return the states of all units if some are removed and made again once, before their next reader."""
    states = plain_states(instance)
    for unit in removed:
        states[unit] = ONCE
    return states


class Layouts:
    """Lays out one step."""

    def __init__(self, instance: Instance) -> None:
        """Make room for its sequences.

        Args:
            instance: the step.
        """
        self.evaluator = Evaluator(instance)
        self._instance = instance
        self._position = {operator: place for place, operator in enumerate(instance.problem.order)}

    def without(self, removed: Iterable[Unit]) -> Layout | None:
        """Return the sequence in which units are removed.

        Args:
            removed: the units.

        Returns:
            None if one of them cannot be made again when it is needed.
        """
        evaluation = self.evaluator.evaluate(removed_states(self._instance, removed))
        if not evaluation.is_valid:
            return None
        problem, trace, length = self._instance.problem, self.evaluator.trace, evaluation.timesteps
        runs: list[list[Timestep]] = [[] for _ in problem.seconds]
        seconds, timestep_of = [], []
        for timestep in range(length):
            operator = trace.operator[timestep]
            runs[operator].append(timestep)
            if trace.copy[timestep]:
                seconds.append(problem.repetition_seconds[operator])
            else:
                seconds.append(problem.seconds[operator])
                timestep_of.append(timestep)
        return Layout(
            tuple(seconds),
            np.array(trace.timestep_bytes[:length], dtype=np.int64),
            tuple(timestep_of),
            tuple(map(tuple, runs)),
            frozenset(unit for unit, count in enumerate(trace.runs) if count),
        )

    def next_access(self, layout: Layout, array: ArrayIndex, after: Timestep) -> Timestep:
        """Return the timestep at which what an operator itself made of an array is accessed next.

        Args:
            layout: of :meth:`without`.
            array: which.
            after: a position of the plain order.

        Returns:
            The end of the sequence if it is not accessed any more.
        """
        problem = self._instance.problem
        made = problem.problem.arrays[array]
        began, end = layout.timestep_of[after], len(layout.seconds)
        users: Iterable[OperatorIndex] = made.consumers
        if self._instance.units.of_array[array] in layout.repeated and made.producer is not None:
            # What comes later reads a repetition.
            phase = problem.phases[made.producer]
            own = [self._position[user] for user in users if problem.phases[user] == phase]
            return min((layout.timestep_of[place] for place in own if place > after), default=end)
        runs = (timestep for user in users for timestep in layout.runs_of[user])
        return min((timestep for timestep in runs if timestep > began), default=end)
