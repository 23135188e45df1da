"""Chooses which operators write over arguments that others read, too: candidate → candidate.

:mod:`olla_fx.passes.take_over` says what could be written over what, and :mod:`olla_solvers.sharing` decides,
together with the order. What was chosen is put into the graph, whose dataflow has the precedence that it
costs. It stays only if the peak falls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from olla_fx.dataflow import Dataflow, build_dataflow
from olla_fx.fx_graph import storages_of
from olla_fx.passes.take_over import arguments_to_write_over, take_over
from olla_fx.rewrites import Change
from olla_fx.rewriting import Candidate, Rewriting
from olla_solvers.graph.bitsets import ancestors
from olla_solvers.order import order_quickly
from olla_solvers.problem import ArrayKind, Problem
from olla_solvers.sharing import Pair, choose_pairs, taken_over

NAME = "results_over_arguments"
"""What a plan's changes call it."""

SECONDS = 0.2
"""Processor time after which no further order is looked for, and the most that one may take."""

LEAST_GAIN = 0.01
"""Share of the peak below which nothing is looked for."""


def choose_sharing(rewriting: Rewriting, candidate: Candidate) -> Candidate:
    """Return the step in which operators write over arguments if the peak falls by that.

    Args:
        rewriting: the step.
        candidate: its graph after everything else that changes it.

    Returns:
        The candidate itself if nothing can be gained. It has an order if there was a choice.
    """
    arguments = _arguments_of_pairs(candidate.dataflow)
    if not arguments:
        return candidate
    candidate = rewriting.ordered(candidate)
    if candidate.schedule is None:
        raise ValueError("the candidate was not ordered")
    problem = candidate.dataflow.problem
    seconds = min(SECONDS, rewriting.seconds)
    order = partial(order_quickly, seconds=seconds)
    choice = choose_pairs(
        problem, tuple(arguments), candidate.schedule, order, least_gain=LEAST_GAIN, seconds=seconds
    )
    if not choice.pairs:
        return candidate
    dataflow = _taken_over(candidate.dataflow, {pair: arguments[pair] for pair in choice.pairs})
    if not _waits_as(dataflow.problem, problem):
        return candidate
    dataflow = rewriting.with_workspaces(dataflow)
    names = [problem.operators[operator].name for operator in choice.schedule.order]
    changes = candidate.changes + tuple(
        Change(NAME, arguments[pair][0], problem.arrays[pair[1]].size_bytes) for pair in choice.pairs
    )
    shared = replace(candidate, dataflow=dataflow, changes=changes, schedule=None)
    shared = rewriting.ordered(shared, names)
    return shared if shared.peak_bytes < candidate.peak_bytes else candidate


def _arguments_of_pairs(dataflow: Dataflow) -> dict[Pair, tuple[str, str]]:
    """Return the pairs of a step's arrays, each with the operator's name and the argument's."""
    index = {node: number for number, node in enumerate(dataflow.operators)}
    array_of = {
        key: array
        for node, produced in zip(dataflow.operators, dataflow.produced, strict=True)
        for key, array in zip(storages_of(node.meta.get("val")), produced, strict=False)
        if key is not None and array is not None
    }
    arrays = dataflow.problem.arrays
    pairs: dict[Pair, tuple[str, str]] = {}
    for node, argument in arguments_to_write_over(dataflow.graph_module.graph):
        (storage,) = storages_of(argument.meta["val"])
        made = dataflow.produced[index[node]][0]
        read = array_of.get(storage) if storage is not None else None
        if made is None or read is None:
            continue
        both_planned = arrays[read].kind is ArrayKind.PLANNED and arrays[made].kind is ArrayKind.PLANNED
        if both_planned and arrays[read].size_bytes == arrays[made].size_bytes:
            pairs.setdefault((read, made), (node.name, argument.name))
    return pairs


def _taken_over(dataflow: Dataflow, chosen: dict[Pair, tuple[str, str]]) -> Dataflow:
    """Return a step in which chosen operators write over arguments."""
    problem = taken_over(dataflow.problem, tuple(chosen))
    sequence = [problem.operators[operator].name for operator in problem.captured_order]
    graph_module = take_over(dataflow.graph_module, dict(chosen.values()), sequence)
    return build_dataflow(graph_module, dataflow.device, dataflow.gradients)


def _waits_as(problem: Problem, before: Problem) -> bool:
    """Return True if operators wait for all that they waited for before the graph's sequence was another."""
    reached = ancestors(problem.predecessors, problem.captured_order)
    number = problem.indices_of(operator.name for operator in before.operators)
    return all(reached[number[later]] >> number[earlier] & 1 for earlier, later in before.edges)
