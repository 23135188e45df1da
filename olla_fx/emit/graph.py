"""Writes a plan out as reordered ``GraphModule``s, one for each phase of the step.

The emitted graph holds the operators in planned order, each followed by the ``getitem`` of its results.
Free nodes (views, scalar arithmetic) stand right before their first user. The generated code deletes every
value after its last use, so storages are released at the planned time. Each line carries its timestep,
and the offset and lifetime of what it makes, as a comment::

    convolution = torch.ops.aten.convolution.default(x, p_conv1_weight, ...)  # t=0: [0, 3211264) lives [0, 3)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from olla_fx import torch_compat
from olla_fx.capture import Role, StepInput
from olla_fx.dataflow import Dataflow
from olla_fx.fx_graph import base_of, end_of_backward, forward_backward_boundary, free_nodes_before
from olla_fx.torch_compat import pytree
from olla_solvers.analysis import lifetimes
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import ArrayKind, Problem

_PREFIX = {
    Role.PARAMETER: "p",
    Role.BUFFER: "b",
    Role.ATTRIBUTE: "a",
    Role.STATE: "state",
    Role.HYPERPARAMETER: "h",
    Role.SCALAR: "scalar",
    Role.NUMBER: "number",
    Role.EXAMPLE: "input",
    Role.TANGENT: "tangent",
    Role.GRADIENT: "gradient",
}


def reordered_graphs(
    dataflow: Dataflow,
    problem: Problem,
    plan: MemoryPlan,
    inputs: Sequence[StepInput],
    begin_operator: Callable[[int], object] | None = None,
) -> tuple[fx.GraphModule, ...]:
    """Write a step's graph anew in planned order.

    Args:
        dataflow: the graph and what its operators and arrays are.
        problem: ``dataflow.problem``, or the same with recorded sizes and workspaces.
        plan: an order and offsets for ``problem``.
        inputs: of the placeholders, which are named after them.
        begin_operator: called with the operator's timestep before each, so that the arena knows which
            requests to expect; None leaves the calls out.

    Returns:
        One module for each phase. One phase alone has the arguments and results of
        ``dataflow.graph_module``. If the graph has a forward/backward boundary, the first returns the
        outputs and a list of what it keeps for the second. That takes the same arguments, the list, which
        it empties as it goes, and an object whose ``take`` it calls with the position of each gradient, the
        gradient as soon as it is made, and whether an operator of backward makes it. Operator nodes carry
        their name in ``problem`` as ``meta["operator"]``.
    """
    source = dataflow.graph_module.graph
    by_name = {node.name: node for node in dataflow.operators}
    output = source.output_node()
    boundary = next((node for node in dataflow.operators if node.target is forward_backward_boundary), None)
    gradients = _gradients(output, boundary)
    comments = _comments(dataflow, problem, plan)
    phase = _Phase(source, inputs, dataflow.operators, None)
    phases = [phase]
    for timestep, name in enumerate(plan.order):
        node = by_name[name]
        if node is boundary:
            phase = _Phase(source, inputs, dataflow.operators, phase)
            phases.append(phase)
            continue
        if node.target is end_of_backward:
            continue
        phase.add(node, timestep, begin_operator)
        for position, gradient in gradients.pop(node, ()) if len(phases) > 1 else ():
            phase.hand_over(position, gradient, is_made_here=True)
    if boundary is None:
        phase.finish(output.args[0], comments)
    else:
        for position, gradient in itertools.chain.from_iterable(gradients.values()):
            phase.hand_over(position, gradient, is_made_here=False)
        phases[1].finish((), comments)
        phases[0].finish((boundary.args[0], phases[1].taken[::-1]), comments)
    constants = dataflow.graph_module
    return tuple(torch_compat.lazy_graph_module(constants, phase.target, "PlannedStep") for phase in phases)


def _gradients(output: fx.Node, boundary: fx.Node | None) -> dict[fx.Node, list[tuple[int, fx.Node]]]:
    """Return the gradients among a step's results with their positions, by the node that computes them."""
    gradients: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
    if boundary is not None:
        results = cast(Sequence[fx.Node], output.args[0])
        for position, gradient in enumerate(results[len(cast(Sequence[object], boundary.args[0])) :]):
            gradients.setdefault(base_of(gradient), []).append((position, gradient))
    return gradients


class _Phase:
    """The graph of one phase as it grows.

    Attributes:
        target: the graph.
        taken: results of the phase before that this one takes over, in this order.
    """

    def __init__(
        self,
        source: fx.Graph,
        inputs: Sequence[StepInput],
        operators: Sequence[fx.Node],
        before: _Phase | None,
    ) -> None:
        self.target = fx.Graph()
        self.taken: list[fx.Node] = []
        self._before = before
        self._emitted: dict[fx.Node, fx.Node] = {}
        self._timesteps: dict[str, tuple[str, int]] = {}
        for node, step_input in zip(source.find_nodes(op="placeholder"), inputs, strict=True):
            self._emitted[node] = self.target.placeholder(_placeholder_name(step_input))
            self._emitted[node].meta = dict(node.meta)
        self._kept = self.target.placeholder("kept") if before is not None else None
        self._gradients = self.target.placeholder("gradients") if before is not None else None
        # Each phase makes views again; results of operators are passed on.
        self._made = frozenset(operators) | {
            result for node in operators for result in node.users if result.target is operator.getitem
        }

    def add(self, node: fx.Node, timestep: int, begin_operator: Callable[[int], object] | None) -> None:
        """Emit an operator, the free nodes that it needs before it, and the parts of its result after it."""
        self._add_free(node)
        if begin_operator is not None:
            self.target.call_function(begin_operator, (timestep,))
        emitted = self._emitted[node] = self.target.node_copy(node, self._find)
        # At once, or the tuple of all results would keep each alive until the last is read.
        for result in node.users:
            if result.target is operator.getitem:
                self._emitted[result] = self.target.node_copy(result, self._find)
        emitted.meta["operator"] = node.name
        self._timesteps[emitted.name] = node.name, timestep

    def hand_over(self, position: int, gradient: fx.Node, *, is_made_here: bool) -> None:
        """Emit the call that hands a gradient over, whose taker makes a tensor of its own if need be."""
        while gradient.target is torch.ops.aten.detach.default:
            gradient = cast(fx.Node, gradient.args[0])
        self._add_result(gradient)
        self.target.call_method("take", (self._gradients, position, self._find(gradient), is_made_here))

    def finish(self, results: object, comments: Mapping[str, str]) -> None:
        """Emit the results, given as nodes of the source."""
        for node in pytree.tree_leaves(results):
            if isinstance(node, fx.Node):
                self._add_result(node)
        self.target.output(fx.map_arg(cast(Argument, results), self._find))
        own_comments = {
            emitted: f"  # t={timestep} {comments[name]}".rstrip()
            for emitted, (name, timestep) in self._timesteps.items()
        }
        self.target.on_generate_code(lambda _: _annotate(own_comments))
        self.target.lint()

    def _add_result(self, node: fx.Node) -> None:
        if node not in self._emitted:
            self._add_free(node)
            if node not in self._made:
                self._emitted[node] = self.target.node_copy(node, self._find)

    def _add_free(self, node: fx.Node) -> None:
        for free in free_nodes_before(node, self._emitted, self._made):
            self._emitted[free] = self.target.node_copy(free, self._find)

    def _find(self, node: fx.Node) -> fx.Node:
        """Return a source node's copy; values of the phase before are popped from the list that it kept."""
        if node not in self._emitted:
            if self._before is None or self._kept is None or node not in self._before._emitted:
                raise ValueError(f"{node.name} is used before it is made")
            self.taken.append(node)
            first = _first_line(self.target)
            with nullcontext() if first is None else self.target.inserting_before(first):
                self._emitted[node] = self.target.call_method("pop", (self._kept,))
            self._emitted[node].meta["val"] = node.meta.get("val")
        return self._emitted[node]


def _first_line(graph: fx.Graph) -> fx.Node | None:
    """Return the first node that is neither a placeholder nor takes over a kept value, if there is one."""
    return next((node for node in graph.nodes if node.op != "placeholder" and node.target != "pop"), None)


def _placeholder_name(step_input: StepInput) -> str:
    readable = "".join(letter if letter.isalnum() else "_" for letter in step_input.name)
    return f"{_PREFIX[step_input.role]}_{readable}"


def _comments(dataflow: Dataflow, problem: Problem, plan: MemoryPlan) -> dict[str, str]:
    """Describe for each operator the offsets and lifetimes of its arrays."""
    order = problem.indices_of(plan.order)
    living = lifetimes(problem, order)
    comments: dict[str, str] = {}
    for timestep, name in enumerate(plan.order):
        parts = []
        for array_index in dataflow.produced[order[timestep]]:
            if array_index is None:
                continue
            array = problem.arrays[array_index]
            if array.kind is ArrayKind.OUTPUT:
                parts.append(f"{array.name}: output")
                continue
            offset, lifetime = plan.offsets[array.name], living[array.name]
            parts.append(
                f"{array.name}: [{offset}, {offset + array.size_bytes}) "
                f"lives [{lifetime.lower}, {lifetime.upper})"
            )
        workspace = plan.workspace_offsets.get(name)
        if workspace is not None:
            size_bytes = problem.operators[order[timestep]].workspace_bytes
            parts.append(f"workspace: [{workspace}, {workspace + size_bytes})")
        comments[name] = "; ".join(parts)
    return comments


def _annotate(comments: Mapping[str, str]) -> Callable[[list[str]], list[str]]:
    """Return a code transformer that puts each comment behind the line that assigns its name."""

    def transform(body: list[str]) -> list[str]:
        annotated = []
        for line in "".join(body).split("\n"):
            name = line.strip().split(" ", 1)[0].split(":", 1)[0]
            annotated.append(line + comments[name] if name in comments and " = " in line else line)
        return ["\n".join(annotated)]

    return transform
