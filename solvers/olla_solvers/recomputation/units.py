"""Groups arrays that are made again together: the units of which the planner chooses.

Arrays that share a maker are made again by one run of all their makers (BatchNorm's result, overwritten by a
ReLU, and its statistics). So every operator belongs to one unit at most, and a reader finds all of a unit's
arrays in the same run of it. A unit that could not be run as one, or not be told apart from arrays that are
never made again, is left out: its arrays are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from olla_solvers.errors import ProblemError
from olla_solvers.problem import ArrayKind, OperatorIndex, Problem, Timestep
from olla_solvers.recomputation.problem import ArrayIndex, RecomputationProblem, Seconds

Unit = int


@dataclass(frozen=True, slots=True)
class Units:
    """What can be made again.

    Attributes:
        operators: of each unit, in the order in which they run.
        arrays: of each unit, those that its run makes again for later readers.
        reads: of each unit, the other units whose arrays it reads.
        seconds: of one run of each unit.
        earliest: for each unit the first timestep of the given order before which it can run again.
        latest: the last such timestep.
        of_array: the unit of each array; -1 if it is kept in any case.
    """

    operators: tuple[tuple[OperatorIndex, ...], ...]
    arrays: tuple[tuple[ArrayIndex, ...], ...]
    reads: tuple[tuple[Unit, ...], ...]
    seconds: tuple[Seconds, ...]
    earliest: tuple[Timestep, ...]
    latest: tuple[Timestep, ...]
    of_array: tuple[Unit, ...]


def find_units(
    problem: RecomputationProblem,
    reads: Sequence[Sequence[ArrayIndex]],
    makes: Sequence[Sequence[ArrayIndex]],
) -> Units:
    """Return the units, such that what one reads of others never leads back to it.

    Args:
        problem: the step.
        reads: the arrays that each operator reads.
        makes: the arrays that each operator makes.

    Raises:
        ProblemError: if a maker is of another phase than the array's producer, or the lists do not fit the
            problem.
    """
    _check(problem)
    position = {operator: timestep for timestep, operator in enumerate(problem.order)}
    groups = _joined(problem)
    groups = [group for group in groups if _is_told_apart(group, makes, problem.problem, reads)]
    groups = _without_cycles(groups, reads)
    of_array = [-1] * len(problem.problem.arrays)
    for unit, (_, arrays) in enumerate(groups):
        for array in arrays:
            of_array[array] = unit
    operators = tuple(tuple(sorted(members, key=position.__getitem__)) for members, _ in groups)
    wanted = tuple(
        _without_repetition(of_array[array] for operator in members for array in reads[operator])
        for members in operators
    )
    return Units(
        operators=operators,
        arrays=tuple(tuple(sorted(arrays)) for _, arrays in groups),
        reads=tuple(
            tuple(other for other in others if other not in (-1, unit)) for unit, others in enumerate(wanted)
        ),
        seconds=tuple(
            sum(problem.repetition_seconds[operator] for operator in members) for members in operators
        ),
        earliest=tuple(1 + max(position[operator] for operator in members) for members in operators),
        latest=tuple(
            min(
                (position[later] for operator in members for later in problem.must_precede.get(operator, ())),
                default=len(problem.order),
            )
            for members in operators
        ),
        of_array=tuple(of_array),
    )


_Group = tuple[set[OperatorIndex], set[ArrayIndex]]


def _check(problem: RecomputationProblem) -> None:
    operators, arrays = len(problem.problem.operators), len(problem.problem.arrays)
    if not problem.problem.is_executable(problem.order):
        raise ProblemError("the order of a step to recompute is not one of its operators")
    if not (
        len(problem.repetition_seconds) == len(problem.seconds) == len(problem.phases) == operators
        and len(problem.makers) == arrays
    ):
        raise ProblemError(
            "a step to recompute needs seconds and a phase for each operator, makers for each array"
        )
    if not all(0 <= seconds < float("inf") for seconds in (*problem.seconds, *problem.again_seconds)):
        raise ProblemError("an operator of a step to recompute takes no finite, positive time")
    for array, makers in enumerate(problem.makers):
        made = problem.problem.arrays[array]
        phases = {problem.phases[operator] for operator in makers}
        if made.producer is not None and phases - {problem.phases[made.producer]}:
            raise ProblemError(f"array {made.name!r} cannot be made again by operators of another phase")


def _joined(problem: RecomputationProblem) -> list[_Group]:
    """Return operators and arrays of the units: arrays that share a maker are in the same one."""
    group_of: dict[OperatorIndex, _Group] = {}
    for array, makers in enumerate(problem.makers):
        if not makers or problem.problem.arrays[array].kind is not ArrayKind.PLANNED:
            continue
        operators, arrays = set(makers), {array}
        for operator in makers:
            if operator in group_of:
                operators |= group_of[operator][0]
                arrays |= group_of[operator][1]
        for operator in operators:
            group_of[operator] = (operators, arrays)
    groups = {id(group[1]): group for group in group_of.values()}
    return sorted(groups.values(), key=lambda group: min(group[0]))


def _is_told_apart(
    group: _Group,
    makes: Sequence[Sequence[ArrayIndex]],
    problem: Problem,
    reads: Sequence[Sequence[ArrayIndex]],
) -> bool:
    """Return False if somebody reads an array of the group beside one that its operators do not make again.

    The first would be read from a run of the unit, the second from the operator itself, and by operator, as
    sources are named, the reader could not tell them apart.
    """
    operators, arrays = group
    beside = {array for operator in operators for array in makes[operator]} - arrays
    readers = {reader for array in arrays for reader in problem.arrays[array].consumers} if beside else ()
    return not any(beside.intersection(reads[reader]) for reader in readers)


def _without_cycles(groups: list[_Group], reads: Sequence[Sequence[ArrayIndex]]) -> list[_Group]:
    """Leave out the units on cycles, and those between two cycles."""
    unit_of = {array: unit for unit, (_, arrays) in enumerate(groups) for array in arrays}
    wanted = [
        {unit_of[array] for operator in operators for array in reads[operator] if array in unit_of} - {unit}
        for unit, (operators, _) in enumerate(groups)
    ]
    wanting: list[set[Unit]] = [set() for _ in groups]
    for unit, others in enumerate(wanted):
        for other in others:
            wanting[other].add(unit)
    on_cycles = set(range(len(groups))) - _trimmed(wanted, wanting) - _trimmed(wanting, wanted)
    return [group for unit, group in enumerate(groups) if unit not in on_cycles]


def _trimmed(inward: Sequence[set[Unit]], outward: Sequence[set[Unit]]) -> set[Unit]:
    """Return the units that are reached by taking away again and again those with nothing inward."""
    missing = [len(edges) for edges in inward]
    free = [unit for unit, count in enumerate(missing) if not count]
    for unit in free:
        for other in outward[unit]:
            missing[other] -= 1
            if not missing[other]:
                free.append(other)
    return set(free)


def _without_repetition(items: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(items))
