"""Plan → reordered ``GraphModule``.

The emitted graph holds the operators in planned order, each followed by the ``getitem`` of its results.
Free nodes (views, scalar arithmetic) stand right before their first user. The generated code deletes every
value after its last use, so storages are released just when the plan says. Each line carries its timestep,
and the offset and lifetime of what it makes, as a comment::

    convolution = torch.ops.aten.convolution.default(x, p_conv1_weight, ...)  # t=0: [0, 3211264) lives [0, 3)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from olla_fx.capture import Role, StepInput
from olla_fx.dataflow import Dataflow, free_nodes_before
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
    Role.EXAMPLE: "input",
}


def emit(
    dataflow: Dataflow,
    problem: Problem,
    plan: MemoryPlan,
    inputs: Sequence[StepInput],
    begin_operator: Callable[[int], object] | None = None,
) -> fx.GraphModule:
    """Write the planned program.

    Args:
        dataflow: the graph and what its operators and arrays are.
        problem: ``dataflow.problem``, or the same with recorded sizes and workspaces.
        plan: an order and offsets for ``problem``.
        inputs: what the placeholders are; they are named after it.
        begin_operator: called with the operator's timestep before each, so that the arena knows which
            requests to expect; None leaves the calls out.

    Returns:
        A module with the same arguments and results as ``dataflow.graph_module``. Operator nodes carry
        their name in ``problem`` as ``meta["operator"]``.
    """
    source = dataflow.graph_module.graph
    target = fx.Graph()
    emitted: dict[fx.Node, fx.Node] = {}
    for node, step_input in zip(source.find_nodes(op="placeholder"), inputs, strict=True):
        emitted[node] = target.placeholder(_placeholder_name(step_input))
        emitted[node].meta = dict(node.meta)
    operators = frozenset(dataflow.operators)
    by_name = {node.name: node for node in dataflow.operators}
    timesteps: dict[str, int] = {}
    for timestep, name in enumerate(plan.order):
        node = by_name[name]
        _emit_free(target, node, emitted, operators)
        if begin_operator is not None:
            target.call_function(begin_operator, (timestep,))
        emitted[node] = target.node_copy(node, emitted.__getitem__)
        # At once, or the tuple of all results would keep each alive until the last is asked for.
        for result in node.users:
            if result.target is operator.getitem:
                emitted[result] = target.node_copy(result, emitted.__getitem__)
        emitted[node].meta["operator"] = name
        timesteps[emitted[node].name] = timestep
    output = source.output_node()
    _emit_free(target, output, emitted, operators)
    target.node_copy(output, emitted.__getitem__)
    target.on_generate_code(lambda _: _annotate(_comments(dataflow, problem, plan, timesteps)))
    target.lint()
    return fx.GraphModule(dataflow.graph_module, target, "PlannedStep")


def _emit_free(
    target: fx.Graph, node: fx.Node, emitted: dict[fx.Node, fx.Node], operators: frozenset[fx.Node]
) -> None:
    for free in free_nodes_before(node, emitted, operators):
        emitted[free] = target.node_copy(free, emitted.__getitem__)


def _placeholder_name(step_input: StepInput) -> str:
    readable = "".join(letter if letter.isalnum() else "_" for letter in step_input.name)
    return f"{_PREFIX[step_input.role]}_{readable}"


def _comments(
    dataflow: Dataflow, problem: Problem, plan: MemoryPlan, timesteps: Mapping[str, int]
) -> dict[str, str]:
    """For each emitted operator, by its name in the code, what stands behind its line."""
    index = {each.name: position for position, each in enumerate(problem.operators)}
    order = [index[name] for name in plan.order]
    living = lifetimes(problem, order)
    comments: dict[str, str] = {}
    for name, timestep in timesteps.items():
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
        workspace = plan.workspace_offsets.get(plan.order[timestep])
        if workspace is not None:
            size_bytes = problem.operators[order[timestep]].workspace_bytes
            parts.append(f"workspace: [{workspace}, {workspace + size_bytes})")
        comments[name] = f"  # t={timestep} {'; '.join(parts)}".rstrip()
    return comments


def _annotate(comments: Mapping[str, str]) -> Callable[[list[str]], list[str]]:
    """A code transformer that puts each comment behind the line that assigns its name."""

    def transform(body: list[str]) -> list[str]:
        annotated = []
        for line in "".join(body).split("\n"):
            name = line.strip().split(" ", 1)[0].split(":", 1)[0]
            annotated.append(line + comments[name] if name in comments and " = " in line else line)
        return ["\n".join(annotated)]

    return transform
