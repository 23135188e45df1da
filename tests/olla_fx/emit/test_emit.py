"""The emitted program: lints, reads as Python, lets go of values in time."""

import ast
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, optim

from olla_fx.capture import Role, StepInput
from olla_fx.emit import Handover, _handover
from olla_fx.emit.graph import reordered_graphs
from olla_solvers.analysis import lifetimes
from olla_solvers.planner import make_plan
from olla_solvers.problem import ArrayKind
from tests.olla_fx.helpers import SmallNet, captured_training, front, images, mlp, vectors

COMMENT = re.compile(r"# t=(\d+)(.*)$")
ARRAY = re.compile(r"([\w.]+): \[(\d+), (\d+)\) lives \[(\d+), (\d+)\)")


@pytest.fixture(
    params=[(mlp, vectors, optim.SGD), (SmallNet, images, optim.AdamW)], ids=["mlp", "convolutional"]
)
def emitted(request):
    make_model, batches, optimizer = request.param
    captured = captured_training(make_model(), batches(1)[0], optimizer)
    dataflow = front(captured)
    plan = make_plan(dataflow.problem, solver="none")
    (module,) = reordered_graphs(dataflow, dataflow.problem, plan, captured.inputs)
    return module, dataflow, plan


def test_the_graph_lints_and_the_code_is_python(emitted):
    module, _, _ = emitted
    module.graph.lint()
    ast.parse(module.code)


def test_operators_stand_in_planned_order(emitted):
    module, _, plan = emitted
    assert [node.meta["operator"] for node in module.graph.nodes if "operator" in node.meta] == list(
        plan.order
    )
    timesteps = [int(match[1]) for match in map(COMMENT.search, module.code.split("\n")) if match]
    assert timesteps == list(range(len(plan.order)))


def test_every_line_says_array_place_and_lifetime(emitted):
    module, dataflow, plan = emitted
    order = [[operator.name for operator in dataflow.problem.operators].index(name) for name in plan.order]
    living = lifetimes(dataflow.problem, order)
    planned = {array.name: array for array in dataflow.problem.arrays if array.kind is ArrayKind.PLANNED}
    seen = set()
    for line in module.code.split("\n"):
        match = COMMENT.search(line)
        for name, lower, upper, born, dead in ARRAY.findall(match[2]) if match else ():
            assert int(lower) == plan.offsets[name]
            assert int(upper) - int(lower) == planned[name].size_bytes
            assert (int(born), int(dead)) == (living[name].lower, living[name].upper)
            assert int(born) == int(match[1])
            seen.add(name)
    assert seen == set(planned)
    assert "output" in module.code


def test_inputs_are_named_after_what_they_are(emitted):
    module, _, _ = emitted
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    assert any(re.match(r"p_\w*weight", name) for name in names)
    assert "scalar_group0_lr" in names
    assert names[-1] == "input_1"


def test_values_are_let_go_after_their_last_use(emitted):
    """Every name but results is set to None in the line of its last use."""
    module, _, _ = emitted
    function = ast.parse(module.code).body[0]
    assigned, released = set(), set()
    for statement in function.body:
        if isinstance(statement, ast.Assign):
            to_none = isinstance(statement.value, ast.Constant) and statement.value.value is None
            for target in statement.targets:
                (released if to_none else assigned).add(target.id)
    returned = {node.id for node in ast.walk(function.body[-1]) if isinstance(node, ast.Name)}
    assert assigned - returned <= released
    assert not returned & released


def test_constants_of_the_graph_are_kept():
    loss_fn = partial(F.cross_entropy, weight=torch.tensor([0.1, 0.2, 0.7]), label_smoothing=0.1)
    captured = captured_training(mlp(), vectors(1)[0], loss_fn=loss_fn)
    dataflow = front(captured)
    plan = make_plan(dataflow.problem, solver="none")
    (module,) = reordered_graphs(dataflow, dataflow.problem, plan, captured.inputs)
    module.graph.lint()
    constants = module.graph.find_nodes(op="get_attr")
    assert constants
    assert all(isinstance(getattr(module, node.target), torch.Tensor) for node in constants)
    statics = [array.name for array in dataflow.problem.arrays if array.kind is ArrayKind.STATIC]
    assert any("constant" in name for name in statics)


def test_what_a_backward_reads_and_writes_of_forward_is_told():
    aten = torch.ops.aten
    x, kept, other = torch.ones(2), torch.ones(3), torch.ones(4)
    forward, backward = fx.Graph(), fx.Graph()
    source = forward.placeholder("x")
    made = [forward.call_function(aten.neg.default, (source,)) for _ in range(2)]
    for node, value in zip(made, (kept, other), strict=True):
        node.meta["val"] = value
    forward.output(((made[1],), list(made)))
    weight = backward.placeholder("x")
    popped = backward.call_method("pop", (backward.placeholder("kept"),))
    written = backward.call_function(aten.mul_.Tensor, (popped, weight))
    weight.meta["val"], popped.meta["val"], written.meta["operator"] = x, kept, "mul"
    backward.placeholder("gradients")
    backward.output(())
    inputs = [StepInput(Role.PARAMETER, "x", None)]
    handover = _handover([fx.GraphModule({}, graph) for graph in (forward, backward)], inputs)
    assert handover == Handover((0,), (0,), frozenset({0}))
