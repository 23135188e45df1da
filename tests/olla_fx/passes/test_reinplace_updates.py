"""Updates that write straight into their array: same bits, no parameter-sized temporary, refused in doubt."""

from functools import partial

import pytest
import torch
from torch import fx, nn, optim

from olla_fx.capture import Role, StepInput, TensorSpec
from olla_fx.passes.in_place_forms import in_place_form
from olla_fx.passes.propagate import propagate_fake_tensors
from olla_fx.passes.reinplace_updates import reinplace_updates
from olla_solvers.problem import ArrayKind
from tests.olla_fx.comparisons import same_bits
from tests.olla_fx.helpers import SmallNet, captured_training, front, images, mlp, vectors

aten = torch.ops.aten
OPTIMIZERS = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adam": (optim.Adam, {}),
    "adamw": (optim.AdamW, {}),
    "adamw-amsgrad": (optim.AdamW, {"amsgrad": True}),
    "nadam": (optim.NAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adagrad": (optim.Adagrad, {}),
    "adadelta": (optim.Adadelta, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (optim.Rprop, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_statistics_are_updated_in_place(name):
    """Parameters, state and batch normalisation's statistics; Rprop builds its state anew."""
    make, options = OPTIMIZERS[name]
    captured = captured_training(SmallNet(), images(1)[0], partial(make, **options))
    dataflow = front(captured)
    graph = dataflow.graph_module.graph
    copied = [node.args[0] for node in graph.find_nodes(op="call_function", target=aten.copy_.default)]
    if name not in ("rprop", "adamax"):
        assert not [array for array in copied if array.op == "placeholder"]
    targets = [node.target for node in graph.nodes]
    assert aten._native_batch_norm_legit.default in targets
    assert aten._native_batch_norm_legit_functional.default not in targets
    if name == "sgd":
        assert aten.copy_.default not in targets


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw"])
def test_a_large_parameter_has_no_temporary_but_its_gradient(name):
    """A classifier as AlexNet's: one weight larger than everything else together."""
    make, options = OPTIMIZERS[name]
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 512))
    captured = captured_training(model, vectors(1)[0], partial(make, **options))
    dataflow = front(captured)
    large = model[2].weight.nbytes
    planned = [array for array in dataflow.problem.arrays if array.kind is ArrayKind.PLANNED]
    sized = [array.name for array in planned if array.size_bytes >= large]
    # Nesterov decays and looks ahead; AdamW makes its denominator in three steps, as eager does.
    assert len(sized) <= {"sgd": 1, "nesterov": 3, "adamw": 4}[name], sized
    assert not [name for name in sized if name.startswith(("addcdiv", "lerp", "addcmul"))]


@pytest.mark.parametrize(
    ("functional", "in_place"),
    [
        (aten.add.Tensor, aten.add_.Tensor),
        (aten.lerp.Scalar, aten.lerp_.Scalar),
        (aten.addcdiv.default, aten.addcdiv_.default),
        (aten.addcmul.default, aten.addcmul_.default),
        (aten.mul.Tensor, aten.mul_.Tensor),
        (aten.mm.default, None),
        (aten.sum.default, None),
        (torch.add, None),
        ("add", None),
    ],
)
def test_in_place_forms(functional, in_place):
    assert in_place_form(functional) is in_place


# Chains, one by one


class Update:
    """A graph that ends in ``copy_(p, value)``; the arguments are a square parameter and a square tensor."""

    def __init__(self, dtype=torch.float32):
        self.graph = fx.Graph()
        self.parameter = self.graph.placeholder("p")
        self.other = self.graph.placeholder("g")
        generator = torch.Generator().manual_seed(3)
        real = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)
        self.examples = tuple(tensor.to(dtype) for tensor in real)

    def __call__(self, target, *arguments, **options):
        return self.graph.call_function(target, arguments, options)

    def finish(self, value, *results):
        """Return what is updated in place now, after checking that the results are the same."""
        self(aten.copy_.default, self.parameter, value)
        self.graph.output(results)
        module = fx.GraphModule(nn.Module(), self.graph)
        expected = self._run(module)
        inputs = [StepInput(Role.PARAMETER, name, TensorSpec.of(tensor))
                  for name, tensor in zip("pg", self.examples, strict=True)]  # fmt: skip
        propagate_fake_tensors(module, module.graph, inputs, torch.device("cpu"))
        updated = reinplace_updates(self.graph)
        self.graph.eliminate_dead_code(lambda node: node.op != "call_function" or "_." in str(node.target))
        self.graph.lint()
        module.recompile()
        for left, right in zip(expected, self._run(module), strict=True):
            assert same_bits(left, right)
        return updated

    def _run(self, module):
        arguments = [tensor.clone() for tensor in self.examples]
        return [*module(*arguments), *arguments]


def test_a_single_operator():
    build = Update()
    assert build.finish(build(aten.add.Tensor, build.parameter, build.other, alpha=-0.1)) == ("p",)


def test_a_chain_of_operators():
    build = Update()
    value = build(aten.mul.Tensor, build.parameter, 0.9)
    value = build(aten.add.Tensor, value, build.other)
    value = build(aten.addcmul.default, value, build.other, build.other, value=0.1)
    assert build.finish(value) == ("p",)


def test_a_reader_before_the_write_is_no_hindrance():
    build = Update()
    seen = build(aten.mul.Tensor, build(aten.t.default, build.parameter), 2.0)
    value = build(aten.add.Tensor, build.parameter, build.other)
    assert build.finish(value, seen) == ("p",)


@pytest.mark.parametrize("view", [None, aten.t.default])
def test_a_reader_of_the_old_value_after_the_write_refuses(view):
    build = Update()
    value = build(aten.add.Tensor, build.parameter, build.other)
    old = build.parameter if view is None else build(view, build.parameter)
    seen = build(aten.mul.Tensor, old, 2.0)
    assert build.finish(value, seen) == ()


def test_a_reader_of_a_link_inside_the_chain_refuses():
    build = Update()
    first = build(aten.mul.Tensor, build.parameter, 0.9)
    value = build(aten.add.Tensor, first, build.other)
    seen = build(aten.exp.default, first)
    assert build.finish(value, seen) == ()


def test_a_reader_of_a_view_of_a_link_refuses():
    build = Update()
    first = build(aten.mul.Tensor, build.parameter, 0.9)
    view = build(aten.t.default, first)
    value = build(aten.add.Tensor, first, build.other)
    assert build.finish(value, build(aten.exp.default, view)) == ()


def test_a_view_of_itself_among_the_arguments_refuses():
    build = Update()
    value = build(aten.add.Tensor, build.parameter, build(aten.t.default, build.parameter))
    assert build.finish(value) == ()


@pytest.mark.parametrize("target", [aten.addmm.default, aten.baddbmm.default])
def test_itself_among_the_arguments_of_a_product_refuses(target):
    build = Update()
    if target is aten.baddbmm.default:
        build.examples = tuple(tensor.reshape(1, 4, 4) for tensor in build.examples)
    value = build(target, build.parameter, build.parameter, build.other)
    assert build.finish(value) == ()


@pytest.mark.parametrize("target", [aten.add.Tensor, aten.addcmul.default])
def test_complex_numbers_are_left_alone(target):
    build = Update(torch.complex64)
    arguments = (build.other,) if target is aten.add.Tensor else (build.other, build.other)
    assert build.finish(build(target, build.parameter, *arguments)) == ()


def test_a_value_that_does_not_start_at_the_parameter_is_copied():
    build = Update()
    assert build.finish(build(aten.mul.Tensor, build.other, 2.0)) == ()


def test_a_value_of_another_layout_is_copied():
    build = Update()
    assert build.finish(build(aten.t.default, build(aten.add.Tensor, build.parameter, build.other))) == ()


def test_a_link_that_is_returned_refuses():
    build = Update()
    first = build(aten.mul.Tensor, build.parameter, 0.9)
    value = build(aten.add.Tensor, first, build.other)
    assert build.finish(value, first) == ()


def test_the_new_value_may_be_returned():
    build = Update()
    value = build(aten.add.Tensor, build.parameter, build.other)
    build.finish(value, value)


def test_a_parameter_written_twice_is_left_alone():
    build = Update()
    build(aten.copy_.default, build.parameter, build(aten.mul.Tensor, build.parameter, 2.0))
    assert build.finish(build(aten.add.Tensor, build.parameter, build.other)) == ()


def test_untrained_models_have_no_updates():
    operators = front(captured_training(mlp(), vectors(1)[0])).operators
    updates = [node for node in operators if node.args[0] in operators[0].graph.find_nodes(op="placeholder")]
    assert sum(node.target._schema.is_mutable for node in updates) == 4
