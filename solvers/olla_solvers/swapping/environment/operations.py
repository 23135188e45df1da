"""A step's operations on memory: requests, reads, writes and frees, in sequence, and how they are related.

They are the nodes of the graph in section 4.2 of "GPU Memory Management for Neural Networks using Deep
Q-Network". "If two rows are continuous or use the same variable, we will add an edge to these two nodes. The
weight of the edge is the time lag between the two nodes."
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from olla_solvers.problem import ArrayKind, Bytes, Timestep
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds


class OperationKind(enum.StrEnum):
    """What an operation does; the first of all begins the step and does nothing."""

    BEGIN = "begin"
    MALLOC = "malloc"
    READ = "read"
    WRITE = "write"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on an array.

    Attributes:
        kind: what it does.
        array: to which array; -1 for the beginning.
        position: of the operator in the step's order that it belongs to.
        begin_seconds: from the step's beginning, if nothing stalls.
    """

    kind: OperationKind
    array: ArrayIndex
    position: Timestep
    begin_seconds: Seconds

    @property
    def last_run(self) -> Timestep:
        """The position of the last operator that has run once the operation is over; -1 for none."""
        return self.position - (self.kind in (OperationKind.BEGIN, OperationKind.MALLOC))


def operations_of(instance: Instance, least_bytes: Bytes = 1) -> tuple[Operation, ...]:
    """Return a step's operations on planned arrays.

    Args:
        instance: the step, which runs in the problem's order.
        least_bytes: smaller arrays are left out.
    """
    problem = instance.problem
    sizes = [array.size_bytes if array.kind is ArrayKind.PLANNED else 0 for array in problem.problem.arrays]
    seconds = [problem.seconds[operator] for operator in problem.order]
    begins = [0.0, *accumulate(seconds)]
    position = {operator: place for place, operator in enumerate(problem.order)}
    freed: list[list[ArrayIndex]] = [[] for _ in problem.order]
    for index, array in enumerate(problem.problem.arrays):
        if array.producer is not None:
            freed[max(position[user] for user in (array.producer, *array.consumers))].append(index)
    operations = [Operation(OperationKind.BEGIN, -1, 0, 0.0)]
    for place, operator in enumerate(problem.order):
        for kind, arrays, moment in (
            (OperationKind.MALLOC, instance.makes[operator], place),
            (OperationKind.READ, instance.reads[operator], place),
            (OperationKind.WRITE, instance.makes[operator], place),
            (OperationKind.FREE, freed[place], place + 1),
        ):
            operations += [
                Operation(kind, array, place, begins[moment])
                for array in arrays
                if sizes[array] >= max(1, least_bytes)
            ]
    return tuple(operations)


def edges_of(operations: Sequence[Operation]) -> dict[tuple[int, int], Seconds]:
    """Return the edges between operations, the earlier one first, with the seconds between them.

    Args:
        operations: of a step.
    """
    users: dict[ArrayIndex, list[int]] = {}
    for node, operation in enumerate(operations[1:], start=1):
        users.setdefault(operation.array, []).append(node)
    pairs = {(node, node + 1) for node in range(len(operations) - 1)}
    for nodes in users.values():
        pairs.update(combinations(nodes, 2))
    return {
        (first, second): operations[second].begin_seconds - operations[first].begin_seconds
        for first, second in sorted(pairs)
    }
