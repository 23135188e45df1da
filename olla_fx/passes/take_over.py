"""Lets chosen operators write their results over arguments that others read, too.

:mod:`olla_fx.passes.reinplace` takes over what no order can miss. What it declines costs precedence, so the
planner chooses (:mod:`olla_solvers.sharing`). The graph's sequence is the meaning of its writes, so operators
stand as the planner had them: those that read an argument in front of the one that writes over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from olla_fx import torch_compat
from olla_fx.passes.in_place_forms import overwritable_arguments, write_over
from olla_fx.passes.propagate import follow_storages, views_in
from olla_fx.passes.regions import Regions
from olla_fx.passes.reinplace import fits_over, may_overwrite
from olla_fx.passes.sequence import put_in_sequence


def arguments_to_write_over(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return operators with an argument that they could write over if nobody else needed it.

    Args:
        graph: after all passes.
    """
    regions = Regions(graph)
    return [
        (node, argument)
        for node in graph.nodes
        if node.op == "call_function"
        for argument in overwritable_arguments(node)
        if fits_over(node, argument, regions)
    ]


def take_over(
    graph_module: fx.GraphModule, chosen: Mapping[str, str], operators: Sequence[str]
) -> fx.GraphModule:
    """Let operators of a copy of a graph write over arguments.

    Args:
        graph_module: after all passes; not changed.
        chosen: names of operators, each with that of the argument.
        operators: names of all operators, in a sequence that the graph allows, and in which those that write
            over an argument come after all others that read it.

    Returns:
        The copy. An operator that may not write over its argument in this sequence does not.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    views = views_in(graph)
    nodes = {node.name: node for node in graph.nodes}
    put_in_sequence(graph, [nodes[name] for name in operators])
    regions = Regions(graph)
    for name in operators:
        if name in chosen:
            node, argument = nodes[name], nodes[chosen[name]]
            if fits_over(node, argument, regions) and may_overwrite(node, argument, regions):
                regions.move(node, argument)
                write_over(node, argument)
    follow_storages(graph_module, graph, views)
    return torch_compat.lazy_graph_module(graph_module, graph)
