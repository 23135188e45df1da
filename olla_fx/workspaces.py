"""What operators ask for, by their kind: so what a recorded run of one graph showed is known of the next.

Kernels of one kind (:func:`olla_fx.costs.kinds.kind_of`) ask for the same workspaces and results, so that a
repetition needs what the operator needed which it repeats. Some ask for larger results than they say: under
autocast, CPU kernels make the mean and the deviation of a layer norm in float32 and say bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from olla_fx.costs.kinds import kind_of
from olla_fx.costs.measurements import Kind
from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import is_marker
from olla_solvers.problem import ArrayKind, Bytes, Problem


@dataclass(frozen=True, slots=True)
class Requested:
    """What operators of a kind ask for.

    Attributes:
        workspace_bytes: beside their arrays.
        more_bytes: of each planned array that they make, beyond what they say.
    """

    workspace_bytes: Bytes = 0
    more_bytes: tuple[Bytes, ...] = ()

    def at_least(self, other: Requested) -> Requested:
        """Return the larger of what two operators of a kind ask for."""
        more_bytes = self.more_bytes or other.more_bytes
        # Another graph may write one of the results over an operand.
        if len(more_bytes) == len(other.more_bytes):
            more_bytes = tuple(map(max, more_bytes, other.more_bytes))
        return Requested(max(self.workspace_bytes, other.workspace_bytes), more_bytes)


Workspaces = Mapping[Kind, Requested]


def workspaces_of(dataflow: Dataflow, problem: Problem, known: Workspaces) -> Workspaces:
    """Return what kinds of operators ask for.

    Args:
        dataflow: a step's graph.
        problem: of it, with the sizes of workspaces and arrays that a run has shown.
        known: of other graphs, of which the larger holds.
    """
    workspaces = dict(known)
    said = dataflow.problem.arrays
    for node, operator, results in zip(dataflow.operators, problem.operators, _made_by(problem), strict=True):
        more_bytes = tuple(
            max(0, problem.arrays[array].size_bytes - said[array].size_bytes) for array in results
        )
        requested = Requested(operator.workspace_bytes, more_bytes if any(more_bytes) else ())
        if requested != Requested():
            kind = kind_of(node)
            workspaces[kind] = requested.at_least(workspaces.get(kind, Requested()))
    return workspaces


def with_workspaces(dataflow: Dataflow, workspaces: Workspaces) -> Dataflow:
    """Return a step whose operators ask for what is known of their kinds."""
    if not workspaces:
        return dataflow
    problem = dataflow.problem
    array_bytes = [array.size_bytes for array in problem.arrays]
    workspace_bytes = []
    for node, results in zip(dataflow.operators, _made_by(problem), strict=True):
        requested = Requested() if is_marker(node) else workspaces.get(kind_of(node), Requested())
        workspace_bytes.append(requested.workspace_bytes)
        if len(results) == len(requested.more_bytes):
            for array, more_bytes in zip(results, requested.more_bytes, strict=True):
                array_bytes[array] += more_bytes
    return replace(dataflow, problem=problem.resized(array_bytes, workspace_bytes))


def _made_by(problem: Problem) -> Sequence[Sequence[int]]:
    """Return the indices of the planned arrays that each operator makes."""
    made: list[list[int]] = [[] for _ in problem.operators]
    for index, array in enumerate(problem.arrays):
        if array.kind is ArrayKind.PLANNED and array.producer is not None:
            made[array.producer].append(index)
    return made
