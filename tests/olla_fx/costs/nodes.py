"""Nodes of single operators on fake tensors, and dataflows of them."""

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from olla_fx.dataflow import build_dataflow

CPU = torch.device("cpu")


def node_of(operator, *arguments, **keywords):
    """A node of an operator on tensors of these layouts."""
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def placed(argument):
            if not isinstance(argument, torch.Tensor):
                return argument
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = mode.from_tensor(argument)
            return node

        given = fx.node.map_aggregate(arguments, placed)
        named = fx.node.map_aggregate(keywords, placed)
        node = graph.call_function(operator, given, dict(named))
        fake = fx.node.map_arg((given, dict(named)), lambda source: source.meta["val"])
        node.meta["val"] = operator(*fake[0], **fake[1])
    return node


def dataflow_of(operator, *arguments, **keywords):
    """The dataflow of one operator."""
    node = node_of(operator, *arguments, **keywords)
    node.graph.output((node,)).meta["val"] = (node.meta["val"],)
    return build_dataflow(fx.GraphModule({}, node.graph), CPU)
