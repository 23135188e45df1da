"""Writes down runs of units and operators, and counts the bytes and seconds of what was written.

For methods whose plans are more than a state for each unit
(:mod:`olla_solvers.recomputation.evaluate` has those): several copies of a unit at a time, or a repetition
at any place. The rules are the evaluator's: a version of an array lives from its producer's timestep to just
after its last reader's, and an operator may work in the memory of what it is the last to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from olla_solvers.problem import ArrayKind, Bytes, OperatorIndex
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Execution, Recomputation
from olla_solvers.recomputation.units import Unit

CopyOf = Callable[[Unit], int]
"""The copy of a unit that is read; 0 for the run of forward itself."""

Version = tuple[ArrayIndex, int]


def run_operator(instance: Instance, operator: OperatorIndex, copy_of: CopyOf) -> Execution:
    """Return the run of an operator in its place in the order.

    Args:
        instance: the step.
        operator: which.
        copy_of: what it reads of earlier phases; of its own it reads the operators' own runs.
    """
    sources: set[tuple[OperatorIndex, int]] = set()
    for array in instance.demands[operator]:
        if copy := copy_of(instance.units.of_array[array]):
            sources.update((maker, copy) for maker in instance.problem.makers[array])
    return Execution(operator, 0, tuple(sorted(sources)))


def run_unit(instance: Instance, unit: Unit, copy: int, copy_of: CopyOf) -> list[Execution]:
    """Return a repetition of a unit: its operators, one after the other.

    Args:
        instance: the step.
        unit: which.
        copy: its number, from 1.
        copy_of: what it reads of other units.
    """
    executions, ran = [], set()
    for operator in instance.units.operators[unit]:
        sources: set[tuple[OperatorIndex, int]] = set()
        for array in instance.reads[operator]:
            other = instance.units.of_array[array]
            if other == unit:
                sources.update((maker, copy) for maker in instance.problem.makers[array] if maker in ran)
            elif other >= 0 and (read := copy_of(other)):
                sources.update((maker, read) for maker in instance.problem.makers[array])
        executions.append(Execution(operator, copy, tuple(sorted(sources))))
        ran.add(operator)
    return executions


def numbered(executions: Sequence[Execution]) -> list[Execution]:
    """Return a sequence whose copies of each operator are numbered as they run, from 1 without gaps."""
    copies: dict[tuple[OperatorIndex, int], int] = {}
    count: dict[OperatorIndex, int] = {}
    result = []
    for execution in executions:
        operator, copy = execution.operator, 0
        if execution.copy:
            copy = count[operator] = count.get(operator, 0) + 1
            copies[operator, execution.copy] = copy
        sources = tuple((source, copies[source, number]) for source, number in execution.sources)
        result.append(Execution(operator, copy, sources))
    return result


def measure(instance: Instance, executions: Sequence[Execution]) -> Recomputation:
    """Return a sequence with its peak, its extra seconds and what it makes again.

    Args:
        instance: the step.
        executions: what runs; every source has run before.
    """
    problem = instance.problem
    repeated = {execution.operator for execution in executions if execution.copy}
    return Recomputation(
        tuple(executions),
        max(resident_bytes(instance, executions), default=0),
        sum(problem.repetition_seconds[execution.operator] for execution in executions if execution.copy),
        tuple(sorted(_arrays_made_by(instance, repeated))),
    )


def resident_bytes(instance: Instance, executions: Sequence[Execution]) -> list[Bytes]:
    """Return the bytes at each timestep of a sequence, if nothing is elsewhere.

    Args:
        instance: the step.
        executions: what runs; every source has run before.
    """
    reads = [versions_read(instance, execution) for execution in executions]
    first: dict[Version, int] = {}
    last: dict[Version, int] = {}
    for timestep, execution in enumerate(executions):
        for array in instance.makes[execution.operator]:
            first[array, execution.copy] = last[array, execution.copy] = timestep
        for version in reads[timestep]:
            last[version] = timestep
    change = [0] * (len(executions) + 1)
    change[0] = instance.problem.lent_bytes
    for version, timestep in first.items():
        size = _bytes(instance, version)
        change[timestep] += size
        change[last[version] + 1] -= size
    resident = list(accumulate(change))
    for timestep, execution in enumerate(executions):
        resident[timestep] += instance.problem.problem.operators[execution.operator].workspace_bytes
        resident[timestep] -= _taken_over(instance, execution, reads[timestep], timestep, last)
    return resident[: len(executions)]


def versions_read(instance: Instance, execution: Execution) -> list[Version]:
    """Return what an execution reads: arrays, and of each which copy.

    Args:
        instance: the step.
        execution: one run of an operator.
    """
    sources = dict(execution.sources)
    versions = []
    for array in instance.reads[execution.operator]:
        producer = instance.problem.problem.arrays[array].producer
        made_again = instance.units.of_array[array] >= 0 and producer is not None
        versions.append((array, sources.get(producer, 0) if made_again and producer is not None else 0))
    return versions


def _bytes(instance: Instance, version: Version) -> Bytes:
    array = instance.problem.problem.arrays[version[0]]
    return array.size_bytes if array.kind is ArrayKind.PLANNED or version[1] else 0


def _taken_over(
    instance: Instance,
    execution: Execution,
    reads: Iterable[Version],
    timestep: int,
    last: dict[Version, int],
) -> Bytes:
    """Return the bytes of what is read here for the last time and whose memory a result takes."""
    version_of = dict(reads)
    free = {array for array, copy in version_of.items() if last[array, copy] == timestep}
    flat, operator = instance.flat, execution.operator
    makes = set(instance.makes[operator])
    total = 0
    for pair in range(flat.taken_starts[operator], flat.taken_starts[operator + 1]):
        read, made = flat.taken_from[pair], flat.taken_by[pair]
        if read in free and made in makes:
            free.remove(read)
            makes.remove(made)
            total += _bytes(instance, (read, version_of[read]))
    return total


def _arrays_made_by(instance: Instance, operators: set[OperatorIndex]) -> Iterable[ArrayIndex]:
    for unit, members in enumerate(instance.units.operators):
        if not operators.isdisjoint(members):
            yield from instance.units.arrays[unit]
