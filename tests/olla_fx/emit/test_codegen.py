import torch
from torch import fx

from olla_fx.emit.codegen import generated_function

aten = torch.ops.aten


def graph_module() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.add.Tensor, (x, graph.get_attr("constant")), {"alpha": 2})
    rows = graph.call_function(aten.view.default, (total, [2, 3]))
    graph.output((graph.call_function(torch.neg, (rows,)), "torch.ops.aten.add.Tensor"))
    return fx.GraphModule({"constant": torch.arange(6.0)}, graph)


def test_the_answer_is_the_graph_modules():
    module = graph_module()
    x = torch.randn(6)
    expected, answer = module(x), generated_function(module.graph, module)(x)
    assert torch.equal(expected[0], answer[0])
    assert answer[1] == "torch.ops.aten.add.Tensor"


def test_operators_are_looked_up_once(monkeypatch):
    module = graph_module()
    function = generated_function(module.graph, module)
    monkeypatch.setattr(torch, "ops", None)
    assert function(torch.ones(6))[0].shape == (2, 3)
