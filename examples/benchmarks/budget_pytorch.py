"""Asks ``torch.compile``'s partitioner what it would save for backward of a captured step.

Its minimum cut and its knapsack (by dynamic programming, greedily, as an integer program) are called as they
are, on the captured graph and with the seconds that everybody else plans with. What it saves is kept, what it
does not save is made again; memory and time of that are evaluated as those of any other plan. Its kernels
would be fused, which saves time that is not seen here.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._functorch import config, partitioners

from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import descendants, first_of_backward, is_free, storages_of
from olla_solvers.recomputation.evaluate import Evaluator
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import RecomputationProblem, Seconds
from olla_solvers.recomputation.published.mirror import mirrored
from olla_solvers.recomputation.walk import KEPT, ONCE

KNAPSACKS = ("dp", "greedy", *(("ilp",) if importlib.util.find_spec("scipy") else ()))
"""How the partitioner chooses what is saved; its integer program needs scipy."""

Point: TypeAlias = tuple[int, float]
"""Peak in bytes, and extra time as a share of the step's."""


class _KnownSeconds(partitioners.CustomRuntimeEstimator):
    """Tells the partitioner what an operator takes."""

    def __init__(self, seconds: Mapping[str, Seconds]) -> None:
        self._seconds = seconds

    def __call__(self, node: fx.Node) -> float:
        return self._seconds.get(node.name, 0.0)

    def uuid(self) -> str:
        return "seconds of the benchmark"


def points_by_pytorch(
    captured: fx.GraphModule,
    dataflow: Dataflow,
    problems: Sequence[RecomputationProblem],
    budgets: Sequence[float],
) -> dict[str, list[Point]]:
    """Return for each knapsack what the partitioner's plans need and take, in the order that suits each.

    Args:
        captured: the functional graph.
        dataflow: of the graph in which the plans are evaluated; its nodes have the same names.
        problems: what may run again in it, in several orders.
        budgets: its ``activation_memory_budget``, from 0 to 1.
    """
    seconds = {node.name: taken for node, taken in zip(dataflow.operators, problems[0].seconds, strict=True)}
    evaluators = [Evaluator(prepare(problem)) for problem in problems]
    step_seconds = problems[0].step_seconds
    known: dict[frozenset[int], Point] = {}

    def point(budget: float) -> Point:
        arrays = _arrays(_saved(captured, budget), dataflow)
        if arrays not in known:
            known[arrays] = min(_point(evaluator, arrays, step_seconds) for evaluator in evaluators)
        return known[arrays]

    points = {}
    estimator = {"activation_memory_budget_runtime_estimator": _KnownSeconds(seconds)}
    with _cuts_made_once():
        for knapsack in KNAPSACKS:
            with config.patch({"activation_memory_budget_solver": knapsack, **estimator}):
                points[knapsack] = list(dict.fromkeys(map(point, budgets)))
    return points


@contextmanager
def _cuts_made_once() -> Iterator[None]:
    """Let the partitioner look up cuts that it asks for again."""
    solve = partitioners.solve_min_cut
    known: dict[Any, Any] = {}

    @functools.wraps(solve)
    def look_up(graph: fx.Graph, nodes: Any, options: Any, dont_ban: Any = None) -> Any:
        key = repr(options), frozenset(node.name for node in dont_ban or ())
        if key not in known:
            saved, banned = solve(graph, nodes, options, dont_ban)
            known[key] = [node.name for node in saved], [node.name for node in banned]
        by_name = {node.name: node for node in graph.nodes}
        saved, banned = ([by_name[name] for name in names] for names in known[key])
        return saved, partitioners.OrderedSet(banned)

    partitioners.solve_min_cut = look_up
    try:
        yield
    finally:
        partitioners.solve_min_cut = solve


def _saved(captured: fx.GraphModule, budget: float) -> list[fx.Node]:
    """Return the nodes of the captured graph that are saved."""
    module, results = _joint(captured)
    graph = module.graph
    nodes = partitioners.classify_nodes(module, [], results)
    for node in reversed(graph.nodes):
        # As the partitioner's caller does it.
        node.dist_from_bw = int(1e9)
        if node.op != "output" and not nodes.is_required_fw(node):
            node.dist_from_bw = 0
        elif node.op != "output":
            nearest = (user.dist_from_bw + 1 for user in node.users)
            node.dist_from_bw = min(nearest, default=int(1e9))
    by_name = {node.name: node for node in captured.graph.nodes}
    saved = partitioners.choose_saved_values_set(graph, nodes, budget)
    return [by_name[node.name] for node in saved if isinstance(node.meta.get("val"), torch.Tensor)]


def _joint(captured: fx.GraphModule) -> tuple[fx.GraphModule, int]:
    """Return a step as the partitioner wants it, and how many of its results are forward's.

    A placeholder stands for the loss's gradient; what is copied into the caller's tensors is a result; what
    only detaches is left out.
    """
    graph, copies = fx.Graph(), {}
    graph.graph_copy(captured.graph, copies)
    begin = first_of_backward(captured.graph)
    if begin is None:
        raise ValueError("the step has no backward")
    begin = copies[begin]
    with graph.inserting_before(next(iter(graph.nodes))):
        tangent = graph.placeholder("tangents_1")
    tangent.meta = dict(begin.meta)
    begin.replace_all_uses_with(tangent)
    late = descendants([tangent])
    results = [copies[node] for node in captured.graph.output_node().all_input_nodes]
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            results.append(node.args[1])
            graph.erase_node(node)
        elif node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            results = [node.args[0] if result is node else result for result in results]
            graph.erase_node(node)
    forward = [node for node in results if node not in late]
    graph.output((*forward, *(node for node in results if node in late)))
    graph.eliminate_dead_code()
    return fx.GraphModule(captured, graph), len(forward)


def _arrays(saved: Sequence[fx.Node], dataflow: Dataflow) -> frozenset[int]:
    """Return the arrays in which saved values lie."""
    by_storage = {}
    for node, produced in zip(dataflow.operators, dataflow.produced, strict=True):
        for key, array in zip(storages_of(node.meta.get("val")), produced, strict=False):
            if key is not None and array is not None:
                by_storage[key] = array
    by_name = {node.name: node for node in dataflow.graph_module.graph.nodes}
    arrays = set()
    for node in saved:
        # Views may be others here, and copies gone.
        while node.op == "call_function" and (
            node.name not in by_name or (is_free(node) and node.target is not operator.getitem)
        ):
            node = node.all_input_nodes[0]
        for key in storages_of(by_name[node.name].meta.get("val")):
            if key in by_storage:
                arrays.add(by_storage[key])
    return frozenset(arrays)


def _point(evaluator: Evaluator, saved: frozenset[int], step_seconds: Seconds) -> Point:
    """Return what a plan needs and takes in one order: units are kept if most of their bytes are."""
    instance = evaluator.instance
    sizes = [array.size_bytes for array in instance.problem.problem.arrays]
    counts = []
    for arrays in instance.units.arrays:
        kept_bytes = sum(sizes[array] for array in arrays if array in saved)
        counts.append(int(2 * kept_bytes <= sum(sizes[array] for array in arrays)))
    plan = evaluator.evaluate([ONCE if count else KEPT for count in counts])
    if not plan.is_valid:
        # Some would have to run again after what they read was overwritten: they are kept.
        plan = mirrored(instance, counts)
    return plan.peak_bytes, plan.extra_seconds / step_seconds


def not_dominated(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in memory and time, the largest memory first."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best[::-1]
