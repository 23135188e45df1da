"""Operators that write over an argument: only where nobody could tell."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from olla_fx.capture import Mode, Role, StepInput, StepRequest, TensorSpec, capture
from olla_fx.passes.propagate import propagate_fake_tensors
from olla_fx.passes.reinplace import reinplace
from olla_solvers.problem import ArrayKind
from tests.olla_fx.comparisons import same_bits
from tests.olla_fx.harness import OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import Written, captured_training, front, images, sgd, vectors

aten = torch.ops.aten


def graph_of(build, *shapes):
    """A graph that ``build`` writes, from placeholders, propagated."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index, _ in enumerate(shapes)]
    graph.output(build(graph.call_function, *inputs))
    module = fx.GraphModule(nn.Module(), graph)
    specs = [
        StepInput(Role.EXAMPLE, str(index), TensorSpec.of(torch.empty(shape)))
        for index, shape in enumerate(shapes)
    ]
    propagate_fake_tensors(module, module.graph, specs, torch.device("cpu"))
    return module


def restored(build, *shapes):
    """Return the number of operators that became in-place; the results must stay as they are."""
    module = graph_of(build, *shapes)
    arguments = [torch.randn(shape) for shape in shapes]
    before = module(*[argument.clone() for argument in arguments])
    kept = [argument.clone() for argument in arguments]
    count = reinplace(module.graph)
    module.graph.lint()
    module.recompile()
    after = module(*arguments)
    pairs = zip((*before, *kept), (*after, *arguments), strict=True)
    assert all(same_bits(left, right) for left, right in pairs)
    return count, [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_chain_of_activations_is_one_array():
    def build(call, x):
        hidden = call(aten.mm.default, (x, x))
        for target in (aten.relu.default, aten.hardswish.default, aten.sigmoid.default):
            hidden = call(target, (hidden,))
        return (call(aten.sum.default, (hidden,)),)

    assert restored(build, (4, 4))[0] == 3


def test_either_argument_may_be_written_over():
    def build(call, x):
        left, right = call(aten.mm.default, (x, x)), call(aten.mm.default, (x, x))
        total = call(aten.mul.Tensor, (left, right))
        return call(aten.mm.default, (total, x)), call(aten.mm.default, (left, x))

    count, targets = restored(build, (4, 4))
    assert count == 1
    assert aten.mul.out in targets


@pytest.mark.parametrize(
    "reader", ["later", "unordered", "returned", "static", "smaller", "wider", "broadcast"]
)
def test_a_value_that_is_still_read_is_not_written_over(reader):
    def build(call, x, row):
        hidden = x if reader == "static" else call(aten.mm.default, (x, x))
        beside = call(aten.view.default, (hidden, [-1]))
        if reader == "unordered":
            early = call(aten.cumsum.default, (beside, 0))
        if reader == "smaller":
            hidden = call(aten.slice.Tensor, (hidden, 0, 0, 2))
        if reader == "wider":
            result = call(
                aten.add.Tensor, (hidden, call(aten._to_copy.default, (hidden,), {"dtype": torch.double}))
            )
        elif reader == "broadcast":
            small = call(aten.mm.default, (row, x))
            result = call(aten.add.Tensor, (small, x))
        else:
            result = call(aten.relu.default, (hidden,))
        results = [call(aten.sum.default, (result,))]
        if reader == "later":
            results.append(call(aten.cumsum.default, (beside, 0)))
        if reader == "unordered":
            results.append(early)
        if reader == "returned":
            results.append(beside)
        return tuple(results)

    assert restored(build, (4, 4), (1, 4))[0] == (1 if reader == "wider" else 0)


def test_a_reader_that_must_come_first_is_no_obstacle():
    def build(call, x):
        hidden = call(aten.mm.default, (x, x))
        scale = call(aten.cumsum.default, (hidden, 0))
        return (call(aten.sum.default, (call(aten.mul.Tensor, (hidden, scale)),)),)

    assert restored(build, (4, 4))[0] == 1


def test_overlapping_views_of_one_tensor_are_not_mixed_up():
    """``x + x.t()`` must read each element of the transpose before it is overwritten."""

    def build(call, x):
        hidden = call(aten.mm.default, (x, x))
        turned = call(aten.t.default, (hidden,))
        return (call(aten.sum.dim_IntList, (call(aten.add.Tensor, (hidden, turned)), [0])),)

    assert restored(build, (4, 4))[0] == 0


@pytest.mark.parametrize("later", [None, "beside", "same", "result"])
def test_a_copy_into_a_slice(later):
    """``hidden[:, :3].sigmoid_()``: in place, unless the old value is read later or the result returned."""

    def build(call, x):
        hidden = call(aten.mm.default, (x, x))
        left = call(aten.slice.Tensor, (hidden, 1, 0, 3))
        right = call(aten.slice.Tensor, (hidden, 1, 3, 6))
        copy = call(aten.copy.default, (left, call(aten.sigmoid.default, (left,))))
        results = [call(aten.cumsum.default, (copy, 0))]
        if later == "beside":
            results.append(call(aten.cumsum.default, (right, 0)))
        if later == "same":
            results.append(call(aten.cumsum.default, (hidden, 0)))
        if later == "result":
            results.append(copy)
        return tuple(results)

    count, targets = restored(build, (6, 6))
    in_place = later in (None, "beside")
    assert count == in_place
    assert (aten.sigmoid_.default in targets) == in_place
    assert (aten.new_empty_strided.default in targets) != in_place
    assert aten.copy.default not in targets


def test_a_copy_that_is_only_copied_again_is_dropped():
    def build(call, x):
        hidden = call(aten.mm.default, (x, x))
        left = call(aten.slice.Tensor, (hidden, 1, 0, 3))
        copy = call(aten.copy.default, (left, call(aten.exp.default, (left,))))
        return (call(aten.slice_scatter.default, (hidden, copy, 1, 0, 3)),)

    _, targets = restored(build, (6, 6))
    assert targets.count(aten.copy.default) == targets.count(aten.copy_.default) == 0


@pytest.mark.parametrize("difference", ["shape", "type"])
def test_a_copy_that_broadcasts_or_converts_is_kept(difference):
    """``grid.select(-1, 0).copy_(linspace)``: what is scattered has the shape of its place."""

    def build(call, x):
        hidden = call(aten.mm.default, (x, x))
        place = call(aten.select.int, (hidden, 1, 0))
        value = call(aten.select.int, (call(aten.cumsum.default, (x, 0)), 1, 2))
        if difference == "shape":
            value = call(aten.slice.Tensor, (value, 0, 0, 1))
        else:
            value = call(aten._to_copy.default, (value,), {"dtype": torch.double})
            place = call(aten._to_copy.default, (place,), {"dtype": torch.half})
        copy = call(aten.copy.default, (place, value))
        return (call(aten.select_scatter.default, (hidden, copy, 1, 0)),)

    restored(build, (4, 4))


def test_a_plain_copy_writes_to_its_target():
    def build(call, x):
        hidden = call(aten.mm.default, (x, x))
        left = call(aten.slice.Tensor, (hidden, 1, 0, 3))
        other = call(aten.slice.Tensor, (x, 1, 3, 6))
        return (call(aten.cumsum.default, (call(aten.copy.default, (left, other)), 0)),)

    _, targets = restored(build, (6, 6))
    assert aten.copy_.default in targets
    assert aten.new_empty_strided.default not in targets


def normalised(layout=torch.contiguous_format):
    first, last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3)
    model = nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), last, nn.BatchNorm2d(4))
    return model.to(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_inference_normalises_in_place(layout):
    batches = [(x.to(memory_format=layout),) for x, _ in images(4)]
    step = check_inference(normalised(layout), batches, 1)
    assert "native_batch_norm.out" in step.graph_module.code


def test_inference_normalises_in_place_at_all_sizes():
    batches = [images(1, batch=batch)[0][:1] for batch in (2, 3, 3, 5, 5, 2, 4)]
    step = check_inference(normalised(), batches, 1)
    assert "native_batch_norm.out" in step.graph_module.code


def test_what_backward_reads_of_a_frozen_normalisation_is_not_written_over():
    model = normalised()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    own = OwnLoop(nn.Sequential(model, nn.Flatten(), nn.Linear(64, 5)), images(1)[0][0])
    own.run(images(4)).assert_served()


def test_a_softmax_takes_the_place_of_its_scores():
    class Attention(nn.Module):
        def forward(self, x):
            return ((x @ x.mT).softmax(-1) @ x).mean(1)

    model = nn.Sequential(nn.Linear(6, 8), Attention(), nn.Linear(8, 3))
    batches = [(torch.randn(2, 20, 6), torch.tensor([0, 2])) for _ in range(3)]
    dataflow = front(captured_training(model, batches[0]))
    targets = [node.target for node in dataflow.operators]
    assert aten._softmax.out in targets
    assert aten._softmax_backward_data.out in targets
    assert targets.count(aten._log_softmax_backward_data.out) == 1
    WholeStep(model, sgd, batches[0]).run(batches)
    OwnLoop(model, batches[0][:1]).run(batches)


def test_an_activation_in_place_needs_one_array():
    """A large activation that eager computes in place is no second array here."""
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(inplace=True), nn.Conv2d(64, 3, 1)).eval()
    captured = capture(StepRequest(model, (torch.randn(1, 3, 32, 32),), Mode.INFERENCE))
    dataflow = front(captured)
    large = [array for array in dataflow.problem.arrays if array.size_bytes == 64 * 32 * 32 * 4]
    assert len(large) == 1
    assert [node.target for node in dataflow.operators].count(aten.relu_.default) == 1


def test_the_gradient_of_an_activation_takes_the_place_of_its_own():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    captured = captured_training(model, images(1)[0], loss_fn=F.cross_entropy)
    dataflow = front(captured)
    targets = [node.target for node in dataflow.operators]
    assert aten.threshold_backward.grad_input in targets
    assert aten.threshold_backward.default not in targets
    planned = [array.size_bytes for array in dataflow.problem.arrays if array.kind is ArrayKind.PLANNED]
    assert planned.count(2 * 16 * 6 * 6 * 4) == 2


def test_in_a_loop_of_ones_own_backward_writes_over_what_forward_has_read():
    """Forward's readers precede the boundary, and what reads the caller's gradient comes after it."""
    model = Written(
        lambda self, x: self.last(F.silu(self.gate(x)) * self.up(x)),
        gate=nn.Linear(6, 12),
        up=nn.Linear(6, 12),
        last=nn.Linear(12, 3),
    )
    own = OwnLoop(model, vectors(1)[0][0]).run(vectors(4))
    own.assert_served()
    _, backward = own.step.stats.graph_modules
    assert "aten.mul.Tensor" not in backward.code
