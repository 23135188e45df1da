"""Makes the plan as its user sees it: of a graph, the order and the offsets."""

from __future__ import annotations

from dataclasses import replace

from olla_fx.at_peak import ArrayAtPeak
from olla_fx.capture import CapturedStep, Role
from olla_fx.dataflow import Dataflow, arrays_of_results
from olla_fx.fx_graph import source_of
from olla_fx.rewriting import Candidate
from olla_fx.step_plan import Plan
from olla_solvers.analysis import lifetimes, resident_bytes
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem

SHOWN_AT_PEAK = 3
"""Of so many arrays at the peak a plan says where they come from."""


def planned(
    captured: CapturedStep, candidate: Candidate, problem: Problem, memory: MemoryPlan, *, is_recorded: bool
) -> Plan:
    """Return the plan of a candidate.

    Args:
        captured: the step; only its graph may be another one.
        candidate: after all that changes the graph.
        problem: of it, perhaps with workspaces.
        memory: order and offsets.
        is_recorded: True if the workspaces are those of a recorded run.
    """
    dataflow = candidate.dataflow
    # What nothing else needs of the graph that was captured is in the one that runs, too.
    of_graph = replace(captured, graph_module=dataflow.graph_module)
    return Plan(
        problem,
        memory,
        checkpointed_operators=captured.recomputed,
        gradients=_gradients_outside(of_graph, dataflow),
        gradients_in_buffer=_arrays_of_gradients(of_graph, dataflow, dataflow.gradients.kept),
        workspaces_recorded=is_recorded,
        micro_batches=captured.micro_batches,
        changes=candidate.changes,
        largest=_largest_at_peak(dataflow, problem, memory),
        recomputed=candidate.recomputed,
        swapped=candidate.swapped,
    )


def _largest_at_peak(dataflow: Dataflow, problem: Problem, memory: MemoryPlan) -> tuple[ArrayAtPeak, ...]:
    """Return the largest arrays at the peak, and what in the model makes them."""
    order = problem.indices_of(memory.order)
    resident = resident_bytes(problem, order)
    peak = max(range(len(order)), key=resident.__getitem__, default=0)
    alive = [name for name, lifetime in lifetimes(problem, order).items() if peak in lifetime]
    arrays = {array.name: array for array in problem.planned}
    largest = sorted(alive, key=lambda name: -arrays[name].size_bytes)[:SHOWN_AT_PEAK]
    shown = []
    for name in largest:
        producer = arrays[name].producer
        source = "" if producer is None else source_of(dataflow.operators[producer])
        shown.append(ArrayAtPeak(name, arrays[name].size_bytes, source))
    return tuple(shown)


def _gradients_outside(captured: CapturedStep, dataflow: Dataflow) -> tuple[str, ...]:
    """Return the arrays of gradients that are not in the buffer."""
    placeholders = dataflow.graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, captured.inputs, strict=True)
    accumulated = tuple(node.name for node, item in pairs if item.role is Role.GRADIENT)
    positions = frozenset(range(len(captured.gradients))) - dataflow.gradients.kept
    return accumulated + _arrays_of_gradients(captured, dataflow, positions)


def _arrays_of_gradients(
    captured: CapturedStep, dataflow: Dataflow, positions: frozenset[int]
) -> tuple[str, ...]:
    first = captured.outputs.results
    return arrays_of_results(dataflow, [first + position for position in sorted(positions)])
