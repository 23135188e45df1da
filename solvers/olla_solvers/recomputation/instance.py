"""A recomputation problem as flat lists of numbers, which plain Python and compiled code read alike.

A list of lists is stored as one list of all items and one of where each part starts: the items of part ``i``
are ``items[starts[i]:starts[i + 1]]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from olla_solvers.analysis import timesteps
from olla_solvers.problem import ArrayKind, Bytes, Timestep
from olla_solvers.recomputation.problem import ArrayIndex, RecomputationProblem
from olla_solvers.recomputation.units import Unit, Units, find_units

MOST_RUNS = 12
"""Runs of one unit in a step, at most."""

Numbers = Any
"""A list of numbers, or a numpy array of them for compiled code."""


class Flat(NamedTuple):
    """The step in numbers; see :mod:`olla_solvers.recomputation.walk`, which reads them."""

    order: Numbers
    phase: Numbers
    array_phase: Numbers
    workspace_bytes: Numbers
    array_bytes: Numbers
    repeated_bytes: Numbers
    unit_of: Numbers
    earliest: Numbers
    latest: Numbers
    unit_seconds: Numbers
    read_starts: Numbers
    read_arrays: Numbers
    made_starts: Numbers
    made_arrays: Numbers
    demand_starts: Numbers
    demand_units: Numbers
    unit_starts: Numbers
    unit_operators: Numbers
    wanted_starts: Numbers
    wanted_units: Numbers
    taken_starts: Numbers
    taken_from: Numbers
    taken_by: Numbers
    moments: Numbers
    stay_arrays: Numbers
    stay_from: Numbers
    stay_until: Numbers
    lent_positions: Numbers
    lent_changes: Numbers


@dataclass(frozen=True)
class Instance:
    """A problem, prepared.

    Attributes:
        problem: what was given.
        units: what can be made again.
        reads: the arrays that each operator reads.
        makes: the arrays that each operator makes.
        demands: for each operator the arrays of units that it reads, and that are of earlier phases: it reads
            their newest repetitions.
        lent: the caller's arrays that each operator accesses, of those that may be elsewhere.
        lent_bytes: of what is lent and there when each operator first runs.
        flat: all of it in numbers.
    """

    problem: RecomputationProblem
    units: Units
    reads: tuple[tuple[ArrayIndex, ...], ...]
    makes: tuple[tuple[ArrayIndex, ...], ...]
    demands: tuple[tuple[ArrayIndex, ...], ...]
    lent: tuple[tuple[ArrayIndex, ...], ...]
    lent_bytes: tuple[Bytes, ...]
    flat: Flat

    def stays_at(self, position: Timestep) -> set[ArrayIndex]:
        """Return the arrays that may be elsewhere when the operator at a position of the order runs."""
        moments = position, position + len(self.problem.order)
        return {
            stay.array
            for stay in self.problem.stays
            for moment in moments
            if stay.gone_before <= moment < stay.back_from
        }

    def phase_of(self, unit: Unit) -> int:
        """Return the phase that a unit's operators belong to."""
        return self.problem.phases[self.units.operators[unit][0]]


def prepare(problem: RecomputationProblem) -> Instance:
    """Return a problem in the form that is planned on.

    Args:
        problem: the step.

    Raises:
        ProblemError: if order, seconds or makers do not fit it.
    """
    reads: list[list[ArrayIndex]] = [[] for _ in problem.problem.operators]
    makes: list[list[ArrayIndex]] = [[] for _ in problem.problem.operators]
    lent: list[list[ArrayIndex]] = [[] for _ in problem.problem.operators]
    for index, array in enumerate(problem.problem.arrays):
        if array.kind is ArrayKind.STATIC:
            for user in array.consumers if index in problem.lent else ():
                lent[user].append(index)
            continue
        if array.producer is not None:
            makes[array.producer].append(index)
        for reader in array.consumers:
            reads[reader].append(index)
    units = find_units(problem, reads, makes)
    phase_of = [
        0 if array.producer is None else problem.phases[array.producer] for array in problem.problem.arrays
    ]
    demands = tuple(
        tuple(array for array in read if units.of_array[array] >= 0 and phase_of[array] < phase)
        for read, phase in zip(reads, problem.phases, strict=True)
    )
    lent_bytes = _lent_bytes(problem)
    return Instance(
        problem,
        units,
        tuple(map(tuple, reads)),
        tuple(map(tuple, makes)),
        demands,
        tuple(map(tuple, lent)),
        tuple(lent_bytes[position] for position in timesteps(problem.order)),
        _flat(problem, units, reads, makes, demands, phase_of, lent_bytes),
    )


def _flat(
    problem: RecomputationProblem,
    units: Units,
    reads: list[list[ArrayIndex]],
    makes: list[list[ArrayIndex]],
    demands: Sequence[Sequence[ArrayIndex]],
    phase_of: list[int],
    lent_bytes: Sequence[Bytes],
) -> Flat:
    arrays = problem.problem.arrays
    is_planned = [array.kind is ArrayKind.PLANNED for array in arrays]
    taken: list[list[tuple[int, int]]] = [[] for _ in problem.problem.operators]
    for read, made in problem.takes_over:
        producer = arrays[made].producer
        if producer is not None and is_planned[read] and is_planned[made]:
            taken[producer].append((read, made))
    read_starts, read_arrays = _joined(reads)
    made_starts, made_arrays = _joined(makes)
    demand_starts, demand_units = _joined(
        [list(dict.fromkeys(units.of_array[array] for array in demanded)) for demanded in demands]
    )
    unit_starts, unit_operators = _joined(units.operators)
    wanted_starts, wanted_units = _joined(units.reads)
    taken_starts, taken_from = _joined([[read for read, _ in pairs] for pairs in taken])
    stays = [stay for stay in problem.stays if stay.array not in problem.lent]
    changes = [after - before for before, after in pairwise((0, *lent_bytes))]
    changed = [position for position, change in enumerate(changes) if change]
    return Flat(
        order=list(problem.order),
        phase=list(problem.phases),
        array_phase=phase_of,
        workspace_bytes=[operator.workspace_bytes for operator in problem.problem.operators],
        array_bytes=[array.size_bytes if plan else 0 for array, plan in zip(arrays, is_planned, strict=True)],
        # What the caller gets is made outside the buffer once; made again beside others, it lies in it.
        repeated_bytes=[array.size_bytes for array in arrays],
        unit_of=list(units.of_array),
        earliest=list(units.earliest),
        latest=list(units.latest),
        unit_seconds=list(units.seconds),
        read_starts=read_starts,
        read_arrays=read_arrays,
        made_starts=made_starts,
        made_arrays=made_arrays,
        demand_starts=demand_starts,
        demand_units=demand_units,
        unit_starts=unit_starts,
        unit_operators=unit_operators,
        wanted_starts=wanted_starts,
        wanted_units=wanted_units,
        taken_starts=taken_starts,
        taken_from=taken_from,
        taken_by=[made for pairs in taken for _, made in pairs],
        moments=[],
        stay_arrays=[stay.array for stay in stays],
        stay_from=[stay.gone_before for stay in stays],
        stay_until=[stay.back_from for stay in stays],
        lent_positions=changed,
        lent_changes=[changes[position] for position in changed],
    )


def _lent_bytes(problem: RecomputationProblem) -> list[Bytes]:
    """Return the bytes of what is lent and there at each position of the order."""
    length = len(problem.order)
    there = [problem.lent_bytes] * length
    for stay in problem.stays if problem.lent else ():
        if stay.array in problem.lent:
            for position in range(stay.gone_before, stay.back_from):
                there[position % length] -= problem.problem.arrays[stay.array].size_bytes
    return there


def _joined(parts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return where each part starts, and all items."""
    starts: list[int] = [0]
    items: list[int] = []
    for part in parts:
        items.extend(part)
        starts.append(len(items))
    return starts, items
