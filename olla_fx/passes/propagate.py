"""Keeps the fake values of a graph's nodes true while passes rewrite it, so that shared storages show.

Operators on fake tensors take some 0.3 ms each. A pass that rewrites a graph changes no shape, but it changes
which tensors share a storage: :func:`follow_storages` runs only what makes views of another storage now.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import StepInput
from olla_fx.fx_graph import storages_of, written_arguments
from olla_fx.torch_compat import OpOverload, schema_of


class _Propagator(fx.Interpreter):
    """Runs a graph on fake tensors and keeps each node's value."""

    def __init__(self, root: nn.Module, graph: fx.Graph, fake_mode: Any) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self._fake_mode = fake_mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant of the graph as a fake tensor."""
        return _as_fake(super().get_attr(target, args, kwargs), self._fake_mode)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and keep its value."""
        value = super().run_node(n)
        n.meta["val"] = value
        return value


def propagate_fake_tensors(
    root: nn.Module, graph: fx.Graph, inputs: Sequence[StepInput], device: torch.device
) -> None:
    """Set ``meta["val"]`` of every node, from scratch.

    Late-bound scalars are the number 0.5: shapes and storages do not depend on them.

    Args:
        root: has the constants of the graph.
        graph: changed in its metadata only.
        inputs: of its placeholders.
        device: the device that it is to run on.
    """
    fake_mode = torch_compat.new_fake_mode()
    for node in graph.nodes:
        node.meta.pop("val", None)
    with fake_mode, torch.no_grad():
        arguments = [step_input.stand_in(device) for step_input in inputs]
        _Propagator(root, graph, fake_mode).run(*arguments)


def views_in(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes whose values lie in storages of their arguments, by a graph's fake values.

    Schemas do not tell: ``unsafe_split`` returns views, and says that it does not.
    """
    return frozenset(node for node in graph.nodes if node.op == "call_function" and _lies_in_argument(node))


def follow_storages(root: nn.Module, graph: fx.Graph, views: frozenset[fx.Node]) -> None:
    """Let ``meta["val"]`` show again which nodes share a storage, after the graph was rewritten.

    What writes to arguments and returns them has their values. What makes a view has a new value if
    no argument lies in the storage of the old one. All other values stay.

    Args:
        root: has the constants of the graph.
        graph: its nodes have values of the right layouts; changed in its metadata only.
        views: from :func:`views_in`, of the graph before it was rewritten.
    """
    fake_mode = torch_compat.fake_mode_of(node.meta.get("val") for node in graph.nodes)
    with fake_mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                node.meta["val"] = _as_fake(operator.attrgetter(str(node.target))(root), fake_mode)
            elif node.target is operator.getitem:
                source, index = node.args
                node.meta["val"] = cast(fx.Node, source).meta["val"][index]
            elif _returns_written(node):
                written = tuple(argument.meta["val"] for argument in written_arguments(node))
                node.meta["val"] = written if len(written) > 1 else written[0]
            elif node in views and not _lies_in_argument(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _lies_in_argument(node: fx.Node) -> bool:
    sources = {key for source in node.all_input_nodes for key in storages_of(source.meta.get("val"))}
    return not (sources - {None}).isdisjoint(storages_of(node.meta.get("val")))


def _returns_written(node: fx.Node) -> bool:
    """Return True if each of an operator's results is an argument that it writes to."""
    results = _written_results(node.target) if isinstance(node.target, OpOverload) else 0
    return 0 < results == len(written_arguments(node))


@functools.cache
def _written_results(target: OpOverload) -> int:
    """Return the number of an operator's results if each is an argument that it writes to, else 0."""
    aliases = [result.alias_info for result in schema_of(target).returns]
    return len(aliases) if all(alias is not None and alias.is_write for alias in aliases) else 0


def _as_fake(constant: Any, fake_mode: Any) -> Any:
    """Return a constant as a fake tensor: views of it must share its storage."""
    if isinstance(constant, torch.Tensor):
        return fake_mode.from_tensor(constant, static_shapes=True)
    return constant
