"""A step in an order with the seconds of its operators, and the gaps between the accesses to its arrays.

The *load* of a timestep is the bytes of all that is on the device then, the caller's arrays included
("Efficient Memory Management for GPU-based Deep Learning Systems", definition 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.analysis import timesteps
from olla_solvers.arrays import Array, ArrayKind
from olla_solvers.errors import ProblemError
from olla_solvers.problem import Bytes, OperatorIndex, Problem, Timestep
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.swapping.gaps import Gap, Loads, gaps_of, remove

Moments: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""Seconds from a step's beginning."""


@dataclass(frozen=True)
class TimedStep:
    """A step in an order.

    Attributes:
        problem: operators and arrays. All that computes with an array, or writes to it, is among its
            consumers.
        order: of the operators.
        seconds: of each operator.
        renewed: static arrays that the caller fills anew before each step, such as its examples: nothing of
            them waits from one step to the next.

    Raises:
        ProblemError: if the order is none, or an operator has no seconds.
    """

    problem: Problem
    order: tuple[OperatorIndex, ...]
    seconds: tuple[Seconds, ...]
    renewed: frozenset[ArrayIndex] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        """Check order and seconds once."""
        if not self.problem.is_executable(self.order):
            raise ProblemError("the order does not run each operator once, after all that it needs")
        are_seconds = all(0 <= seconds < math.inf for seconds in self.seconds)
        if len(self.seconds) != len(self.problem.operators) or not are_seconds:
            raise ProblemError("each operator needs its seconds, a number that is not negative")

    @property
    def length(self) -> int:
        """Timesteps of the step."""
        return len(self.order)

    @cached_property
    def durations(self) -> tuple[Seconds, ...]:
        """Seconds of each timestep."""
        return tuple(self.seconds[operator] for operator in self.order)

    @cached_property
    def begins(self) -> Moments:
        """When each timestep of this step and the next two begins if nothing stalls, and when they end."""
        return np.concatenate([[0.0], np.cumsum(self.durations * 3)])

    @cached_property
    def accesses(self) -> tuple[tuple[Timestep, ...], ...]:
        """For each array the timesteps that make, read or write it, ascending."""
        timestep = timesteps(self.order)
        return tuple(tuple(sorted(timestep[user] for user in _users(array))) for array in self.problem.arrays)

    @cached_property
    def load_bytes(self) -> Loads:
        """The load of each timestep if nothing is swapped."""
        change = np.zeros(self.length + 1, dtype=np.int64)
        for array, accesses in zip(self.problem.arrays, self.accesses, strict=True):
            first, end = alive(array, accesses, self.length)
            change[first] += array.size_bytes
            change[end] -= array.size_bytes
        workspaces = [self.problem.operators[operator].workspace_bytes for operator in self.order]
        return np.cumsum(change)[:-1] + np.array(workspaces, dtype=np.int64)

    @cached_property
    def peak_bytes(self) -> Bytes:
        """The largest load."""
        return int(self.load_bytes.max(initial=0))

    @cached_property
    def gaps(self) -> tuple[tuple[Gap, ...], ...]:
        """The gaps of each array; none of those that are handed to the caller, who may read them any time."""
        return tuple(tuple(self._gaps(index)) for index in range(len(self.problem.arrays)))

    def _gaps(self, index: ArrayIndex) -> list[Gap]:
        array = self.problem.arrays[index]
        if array.kind is ArrayKind.OUTPUT:
            return []
        stays = array.kind is ArrayKind.STATIC and index not in self.renewed
        return gaps_of(index, array.size_bytes, self.accesses[index], self.length if stays else None)

    def load_without(self, gaps: Sequence[Gap]) -> Loads:
        """Return the load of each timestep if arrays are away as long as they can be."""
        load = self.load_bytes.copy()
        for gap in gaps:
            remove(load, gap.out_after + 1, gap.back_before, gap.size_bytes)
        return load


def alive(array: Array, accesses: Sequence[Timestep], length: int) -> tuple[Timestep, Timestep]:
    """Return the half-open timesteps of a step in which an array is there.

    Args:
        array: which.
        accesses: to it.
        length: of the step.
    """
    if array.kind is ArrayKind.STATIC:
        return 0, length
    return accesses[0], length if array.kind is ArrayKind.OUTPUT else accesses[-1] + 1


def _users(array: Array) -> tuple[OperatorIndex, ...]:
    return array.consumers if array.producer is None else (array.producer, *array.consumers)
