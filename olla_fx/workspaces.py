"""What operators need beside their arrays, by their kind: so what one graph showed is known of the next.

Kernels of one kind (:func:`olla_fx.costs.kinds.kind_of`) ask for the same, so that a repetition needs what
the operator needed which it repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from olla_fx.costs.kinds import kind_of
from olla_fx.costs.measurements import Kind
from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import is_marker
from olla_solvers.problem import Bytes, Operator, Problem

Workspaces = Mapping[Kind, Bytes]


def workspaces_of(dataflow: Dataflow, problem: Problem, known: Workspaces) -> Workspaces:
    """Return the workspaces of kinds of operators.

    Args:
        dataflow: a step's graph.
        problem: of it, with its operators' workspaces.
        known: those of other graphs, of which the larger holds.
    """
    workspaces = dict(known)
    for node, operator in zip(dataflow.operators, problem.operators, strict=True):
        if operator.workspace_bytes:
            kind = kind_of(node)
            workspaces[kind] = max(operator.workspace_bytes, workspaces.get(kind, 0))
    return workspaces


def with_workspaces(dataflow: Dataflow, workspaces: Workspaces) -> Dataflow:
    """Return a step whose operators have the workspaces that are known of their kinds."""
    if not workspaces:
        return dataflow
    operators = tuple(
        Operator(operator.name, 0 if is_marker(node) else workspaces.get(kind_of(node), 0))
        for node, operator in zip(dataflow.operators, dataflow.problem.operators, strict=True)
    )
    return replace(dataflow, problem=replace(dataflow.problem, operators=operators))
