"""From graphs to problems: storages, views, hazards, kinds; and orders that are free give the same bits."""

import dataclasses
import random
from operator import getitem

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn, optim
from torch.nn import functional

from olla_fx.alignment import rounded
from olla_fx.capture import Mode, Role, StepInput, StepRequest, TensorSpec, capture
from olla_fx.dataflow import build_dataflow
from olla_fx.emit.graph import reordered_graphs
from olla_fx.fx_graph import draws_random_numbers
from olla_fx.passes import run_passes
from olla_fx.passes.propagate import propagate_fake_tensors
from olla_solvers.planner import make_plan
from olla_solvers.problem import ArrayKind
from tests.olla_fx.comparisons import same_bits
from tests.olla_fx.helpers import SmallNet, captured_training, front, images, mlp, vectors

aten = torch.ops.aten
CPU = torch.device("cpu")


def dataflow_of(graph, *examples):
    """The dataflow of a graph whose placeholders are like ``examples``."""
    module = fx.GraphModule(nn.Module(), graph)
    specs = map(TensorSpec.of, examples)
    inputs = [StepInput(Role.EXAMPLE, str(index), spec) for index, spec in enumerate(specs)]
    propagate_fake_tensors(module, module.graph, inputs, CPU)
    return build_dataflow(module, CPU), inputs


class Written:
    """A graph under construction."""

    def __init__(self, *examples):
        self.graph = fx.Graph()
        self.examples = examples
        self.inputs = [self.graph.placeholder(f"x{index}") for index in range(len(examples))]

    def __call__(self, target, *arguments, **options):
        name = target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else "item"
        return self.graph.create_node("call_function", target, arguments, options, name=name)

    def returning(self, *results):
        self.graph.output(results)
        return dataflow_of(self.graph, *self.examples)[0]


def names(dataflow):
    return [operator.name for operator in dataflow.problem.operators]


def arrays(dataflow, kind):
    return {array.name: array.size_bytes for array in dataflow.problem.arrays if array.kind is kind}


def edges(dataflow):
    name = names(dataflow)
    return {(name[earlier], name[later]) for earlier, later in dataflow.problem.edges}


def consumers(dataflow, array):
    producer = next(candidate for candidate in dataflow.problem.arrays if candidate.name == array)
    return [names(dataflow)[consumer] for consumer in producer.consumers]


def test_views_are_no_operators_and_no_arrays():
    build = Written(torch.ones(4, 6))
    (x,) = build.inputs
    made = build(aten.relu.default, x)
    view = build(aten.view.default, made, [24])
    piece = build(aten.slice.Tensor, view, 0, 2, 5)
    transposed = build(aten.t.default, build(aten.unsqueeze.default, piece, 0))
    result = build(aten.exp.default, transposed)
    dataflow = build.returning(result)
    assert names(dataflow) == ["relu", "exp"]
    assert arrays(dataflow, ArrayKind.PLANNED) == {"relu": 128}
    assert consumers(dataflow, "relu") == ["exp"]


@pytest.mark.parametrize(
    ("target", "arguments", "free"),
    [
        (aten.reshape.default, ([24],), False),
        (aten._unsafe_view.default, ([6, 4],), True),
        (aten.contiguous.default, (), False),
    ],
)
def test_a_view_that_copies_is_known_by_its_storage(target, arguments, free):
    """``reshape`` and ``contiguous`` of a transposed tensor copy; of a dense one they do not."""
    for transposed in (True, False):
        build = Written(torch.ones(4, 6))
        made = build(aten.relu.default, build.inputs[0])
        if transposed and target is not aten._unsafe_view.default:
            made = build(aten.t.default, made)
        dataflow = build.returning(build(aten.exp.default, build(target, made, *arguments)))
        copies = transposed and not free
        assert len(names(dataflow)) == (3 if copies else 2), names(dataflow)
        assert len(arrays(dataflow, ArrayKind.PLANNED)) == (2 if copies else 1)


def test_each_output_of_an_operator_is_an_array_with_its_own_readers():
    build = Written(torch.ones(4, 6))
    pair = build(aten.topk.default, build.inputs[0], 3)
    values, indices = (build(getitem, pair, index) for index in (0, 1))
    dataflow = build.returning(build(aten.exp.default, values), build(aten.neg.default, indices))
    assert arrays(dataflow, ArrayKind.PLANNED) == {"topk.0": 64, "topk.1": 128}
    assert consumers(dataflow, "topk.0") == ["exp"]
    assert consumers(dataflow, "topk.1") == ["neg"]


def test_outputs_that_nobody_reads_are_arrays():
    build = Written(torch.ones(4, 6))
    pair = build(aten.topk.default, build.inputs[0], 3)
    dataflow = build.returning(build(aten.exp.default, build(getitem, pair, 0)))
    assert arrays(dataflow, ArrayKind.PLANNED) == {"topk.0": 64, "topk.1": 128}
    assert consumers(dataflow, "topk.1") == []


def test_pieces_of_a_split_are_views():
    build = Written(torch.ones(4, 6))
    made = build(aten.relu.default, build.inputs[0])
    pieces = build(aten.split.Tensor, made, 2)
    dataflow = build.returning(build(aten.exp.default, build(getitem, pieces, 0)))
    assert names(dataflow) == ["relu", "exp"]


def test_static_planned_and_output_arrays_stand_apart():
    build = Written(torch.ones(4, 6), torch.ones(6, 4))
    x, y = build.inputs
    hidden = build(aten.mm.default, x, y)
    result = build(aten.relu.default, hidden)
    dataflow = build.returning(build(aten.view.default, result, [16]), x)
    assert arrays(dataflow, ArrayKind.STATIC) == {"x0": 128, "x1": 128}
    assert arrays(dataflow, ArrayKind.PLANNED) == {"mm": 64}
    assert arrays(dataflow, ArrayKind.OUTPUT) == {"relu": 64}
    assert dataflow.problem.static_bytes == 256


def test_sizes_are_those_of_the_storage_rounded_up():
    build = Written(torch.ones(3, 3))
    dataflow = build.returning(build(aten.exp.default, build(aten.relu.default, build.inputs[0])))
    assert arrays(dataflow, ArrayKind.PLANNED) == {"relu": 64}
    assert dataflow.storage_bytes[1] == 36
    assert [rounded(size_bytes, 64) for size_bytes in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_a_write_waits_for_every_reader_through_any_view():
    build = Written(torch.ones(4, 6), torch.ones(4, 6))
    weight, x = build.inputs
    before = build(aten.mul.Tensor, build(aten.t.default, weight), build(aten.t.default, x))
    partly = build(aten.exp.default, build(aten.select.int, weight, 0, 1))
    written = build(aten.add_.Tensor, weight, x)
    after = build(aten.neg.default, weight)
    dataflow = build.returning(before, partly, written, after)
    assert {("mul", "add_"), ("exp", "add_"), ("add_", "neg")} <= edges(dataflow)
    assert ("mul", "exp") not in edges(dataflow)


def test_a_write_through_a_view_is_a_write_to_the_storage():
    build = Written(torch.ones(4, 6))
    made = build(aten.relu.default, build.inputs[0])
    read = build(aten.exp.default, made)
    written = build(aten.mul_.Tensor, build(aten.slice.Tensor, build(aten.t.default, made), 0, 0, 2), 2.0)
    again = build(aten.neg.default, made)
    dataflow = build.returning(read, again, written)
    assert {("relu", "exp"), ("exp", "mul_"), ("relu", "mul_"), ("mul_", "neg")} <= edges(dataflow)
    assert consumers(dataflow, "relu") == ["exp", "mul_", "neg"]


def test_writes_keep_their_order():
    build = Written(torch.ones(4, 6))
    (x,) = build.inputs
    build(aten.add_.Tensor, x, 1.0)
    build(aten.mul_.Tensor, x, 2.0)
    build(aten.sub_.Tensor, x, 3.0)
    dataflow = build.returning()
    assert edges(dataflow) == {("add_", "mul_"), ("mul_", "sub_")}


def test_operators_that_draw_random_numbers_keep_their_order():
    build = Written(torch.ones(4, 6))
    (x,) = build.inputs
    results = [
        build(aten.bernoulli.p, x, 0.5),
        build(aten.exp.default, x),
        build(aten.rand_like.default, x),
        build(aten.native_dropout.default, x, 0.5, True),
    ]
    results[-1] = build(getitem, results[-1], 0)
    dataflow = build.returning(*results)
    assert edges(dataflow) == {("bernoulli", "rand_like"), ("rand_like", "native_dropout")}


def test_every_operator_with_a_generator_is_known_to_draw():
    """The order of random numbers rests on a tag: see that torch has not forgotten to set it."""
    graph = fx.Graph()
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            target = getattr(packet, overload)
            if any("Generator" in str(argument.type) for argument in target._schema.arguments):
                assert draws_random_numbers(graph.call_function(target)), target


def test_numbers_read_from_a_tensor_wait_for_its_update():
    """Adam reads its step with ``.item()`` after adding to it."""
    dataflow = front(captured_training(mlp(), vectors(1)[0], optim.Adam))
    all_edges = edges(dataflow)
    for name in names(dataflow):
        if name.startswith("_local_scalar_dense"):
            node = next(operator for operator in dataflow.operators if operator.name == name)
            assert any(later == name for _, later in all_edges), node.args
            assert any(earlier == name for earlier, _ in all_edges)


def test_a_training_steps_problem_is_sound():
    dataflow = front(captured_training(SmallNet(), images(1)[0], optim.AdamW))
    static = arrays(dataflow, ArrayKind.STATIC)
    placeholders = dataflow.graph_module.graph.find_nodes(op="placeholder")
    assert len(static) == sum(isinstance(node.meta["val"], torch.Tensor) for node in placeholders)
    assert len(arrays(dataflow, ArrayKind.OUTPUT)) == 1
    assert len(dataflow.operators) == len(dataflow.problem.operators) == len(dataflow.produced)
    assert len(dataflow.storage_bytes) == len(dataflow.problem.arrays)


# Every order that the problem allows computes the same bits.

CHOICES = (
    "add",
    "mul",
    "relu",
    "t",
    "view",
    "slice",
    "write",
    "write_view",
    "rand",
    "topk",
    "reshape",
    "sub",
)


def apply(build, choice, tensors, draw):
    """Add one node (or a few) to the graph; tensors are all 4 by 4 or views of such."""
    tensor, other = tensors[draw % len(tensors)], tensors[(draw // 7) % len(tensors)]
    match choice:
        case "add" | "mul" | "sub":
            return build(getattr(aten, choice).Tensor, tensor, other)
        case "relu":
            return build(aten.relu.default, tensor)
        case "t":
            return build(aten.t.default, tensor)
        case "view":
            flat = build(aten.reshape.default, tensor, [16])
            return build(aten.view.default, flat, [4, 4])
        case "reshape":
            return build(aten.reshape.default, build(aten.t.default, tensor), [4, 4])
        case "slice":
            half = build(aten.slice.Tensor, tensor, 0, 0, 2)
            return build(aten.cat.default, [half, build(aten.slice.Tensor, other, 0, 2, 4)])
        case "write":
            return build(aten.add_.Tensor, tensor, build(aten.mul.Tensor, other, 0.5))
        case "write_view":
            build(aten.mul_.Tensor, build(aten.select.int, tensor, 0, draw % 4), 0.5)
            return tensor
        case "rand":
            return build(aten.add.Tensor, tensor, build(aten.rand_like.default, tensor))
        case _:
            return build(getitem, build(aten.topk.default, tensor, 4), 0)


def shuffled(problem, seed):
    """A random order that respects every edge."""
    generator = random.Random(seed)
    waiting = [len(predecessors) for predecessors in problem.predecessors]
    ready = [index for index, missing in enumerate(waiting) if not missing]
    order = []
    while ready:
        operator = ready.pop(generator.randrange(len(ready)))
        order.append(operator)
        for successor in problem.successors[operator]:
            waiting[successor] -= 1
            if not waiting[successor]:
                ready.append(successor)
    assert len(order) == len(problem.operators)
    return order


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.sampled_from(CHOICES), st.integers(0, 1000)), min_size=2, max_size=14),
    seed=st.integers(0, 1000),
)
def test_any_order_of_the_problem_computes_the_same_bits(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    examples = [torch.randn(4, 4, generator=generator) for _ in range(2)]
    build = Written(*examples)
    tensors = list(build.inputs)
    for choice, draw in steps:
        tensors.append(apply(build, choice, tensors, draw))
    build.graph.output(tuple(tensors))
    dataflow, inputs = dataflow_of(build.graph, *examples)
    plan = make_plan(dataflow.problem, solver="none")

    def run(module):
        torch.manual_seed(seed)
        arguments = [example.clone() for example in examples]
        with torch.no_grad():
            return [*module(*arguments), *arguments]

    expected = run(dataflow.graph_module)
    for attempt in range(4):
        order = shuffled(dataflow.problem, seed + attempt)
        named = tuple(dataflow.problem.operators[index].name for index in order)
        (module,) = reordered_graphs(
            dataflow, dataflow.problem, dataclasses.replace(plan, order=named), inputs
        )
        for left, right in zip(expected, run(module), strict=True):
            assert same_bits(left, right)


def test_numbers_on_another_device_take_no_memory_and_keep_their_order() -> None:
    """An optimizer counts its steps on the host while its parameters are on a GPU."""
    model, x, y = mlp(), torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    captured = capture(StepRequest(model, (x, y), Mode.TRAINING, functional.cross_entropy, optimizer))
    graph_module = run_passes(captured).graph_module
    here = build_dataflow(graph_module, torch.device("cpu"))
    elsewhere = build_dataflow(graph_module, torch.device("meta"))
    assert sum(array.size_bytes for array in here.problem.arrays) > 0
    assert [array.size_bytes for array in elsewhere.problem.arrays] == [0] * len(here.problem.arrays)
    assert all(array is None for results in elsewhere.produced for array in results)
    assert elsewhere.problem.before == here.problem.before
    assert [array.consumers for array in elsewhere.problem.arrays] == [
        array.consumers for array in here.problem.arrays
    ]
