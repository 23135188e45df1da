"""How much operators compute and move, against what one counts by hand."""

import pytest
import torch
from torch import fx, nn

import olla_fx.operators  # noqa: F401 - defines operators that are asked for by name
from olla_fx.capture import Mode, StepRequest
from olla_fx.compile import compile_step
from olla_fx.compiled import CompileRequest
from olla_fx.costs import operator_seconds, profile_by_name, work_of
from olla_fx.costs.work import touched_bytes
from olla_fx.models import build_model, optimizer_by_name
from tests.olla_fx.costs.nodes import node_of
from tests.olla_fx.helpers import captured_training, front, images, mlp, vectors

aten = torch.ops.aten
CPU = torch.device("cpu")
FLOAT_BYTES = 4


def work(operator, *arguments, **keywords):
    return work_of(node_of(operator, *arguments, **keywords), CPU)


def floats(*shape):
    return torch.empty(shape)


@pytest.mark.parametrize(
    ("operator", "arguments", "expected"),
    [
        (aten.mm.default, (floats(3, 5), floats(5, 7)), 2 * 3 * 5 * 7),
        (aten.addmm.default, (floats(7), floats(3, 5), floats(5, 7)), 2 * 3 * 5 * 7),
        (aten.bmm.default, (floats(2, 3, 5), floats(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (aten.addmm_.default, (floats(3, 7), floats(3, 5), floats(5, 7)), 2 * 3 * 5 * 7),
        (aten.add.Tensor, (floats(3, 5), floats(3, 5)), 0),
        (
            torch.ops.olla_fx.grouped_mm.default,
            (floats(6, 8), floats(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)),
            2 * 6 * 8 * 4,
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (floats(2, 3, 5, 8), floats(2, 3, 7, 8), floats(2, 3, 7, 8)),
            2 * 2 * (2 * 3) * 5 * 7 * 8,
        ),
    ],
)
def test_products_are_counted(operator, arguments, expected):
    assert work(operator, *arguments).flops == expected


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_backward_of_a_convolution_takes_forward_once_for_each_gradient(groups, transposed):
    source, weight = floats(4, 8, 10, 10), floats(8, 8 // groups, 3, 3)
    layout = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    forward = work(aten.convolution.default, source, weight, None, *layout).flops
    assert forward == 2 * 4 * 100 * 9 * 8 * (8 // groups)
    for wanted in ([True, True, False], [False, True, True], [True, False, False]):
        backward = work(
            aten.convolution_backward.default, floats(4, 8, 10, 10), source, weight, [8], *layout, wanted
        )
        assert backward.flops == forward * sum(wanted[:2])


@pytest.mark.parametrize(
    ("operator", "arguments", "keywords", "elements"),
    [
        (aten.relu.default, (floats(10),), {}, 20),
        (aten.relu_.default, (floats(10),), {}, 20),
        (aten.add.Tensor, (floats(10), floats(10)), {}, 30),
        (aten.add_.Tensor, (floats(10), floats(10)), {}, 30),
        (aten.add.out, (floats(10), floats(10)), {"out": floats(10)}, 30),
        # an expanded tensor has one element in memory
        (aten.add.Tensor, (floats(10), floats(1).expand(10)), {}, 21),
        # a view counts as far as it reaches
        (aten.relu.default, (floats(10, 10)[:, :3],), {}, 60),
        (aten.copy_.default, (floats(10), floats(10)), {}, 20),
        (aten.zeros.default, ([10],), {}, 10),
        (aten.empty.memory_format, ([10],), {}, 0),
        (aten.fill_.Scalar, (floats(10), 0.0), {}, 10),
        (aten.cat.default, ([floats(10), floats(20)],), {}, 60),
        # two indices of 8 bytes, two rows read and written
        (aten.embedding.default, (floats(1000, 5), torch.zeros(2, dtype=torch.int64)), {}, 4 + 20),
        (aten.index_select.default, (floats(1000, 5), 0, torch.zeros(2, dtype=torch.int64)), {}, 4 + 20),
        (aten._softmax.default, (floats(4, 5), 1, False), {}, 40),
        # the numbers twice, once for the statistics
        (
            aten._native_batch_norm_legit.no_stats,
            (floats(2, 1, 100), None, None, True, 0.1, 1e-5),
            {},
            600 + 2,
        ),
    ],
)
def test_bytes_are_those_that_are_touched(operator, arguments, keywords, elements):
    assert work(operator, *arguments, **keywords).moved_bytes == elements * FLOAT_BYTES


def test_a_tensor_given_twice_is_read_once():
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = floats(10)
    node = graph.call_function(aten.mul.Tensor, (source, source))
    node.meta["val"] = floats(10)
    assert work_of(node, CPU).moved_bytes == 20 * FLOAT_BYTES


def test_overlapping_windows_touch_their_memory_once():
    assert touched_bytes(torch.zeros(10).unfold(0, 3, 1)) == 10 * FLOAT_BYTES
    assert touched_bytes(torch.zeros(0, 3)) == 0


def test_tensors_on_another_device_count_nothing():
    node = node_of(aten.add_.Tensor, floats(10), floats(10))
    assert work_of(node, torch.device("cuda")).moved_bytes == 0


def test_computing_is_in_the_type_of_the_numbers():
    halves = [floats(4, 4).bfloat16() for _ in range(2)]
    assert work(aten.mm.default, *halves).dtype is torch.bfloat16
    tokens = torch.zeros(2, dtype=torch.int64)
    assert work(aten.embedding.default, floats(9, 4).double(), tokens).dtype is torch.float64


def test_training_takes_three_times_the_products_of_forward():
    dataflow = front(captured_training(mlp(), vectors(1)[0]))
    flops = sum(work_of(node, dataflow.device).flops for node in dataflow.operators)
    forward = 2 * 4 * (6 * 8 + 8 * 3)
    assert flops == 3 * forward - 2 * 4 * 6 * 8  # the input has no gradient


def test_resnet50_has_its_published_operations():
    case = build_model("torchvision:resnet50", batch_size=2, device="meta")
    captured = captured_training(
        case.model, case.inputs, lambda parameters: optimizer_by_name("sgd", parameters)
    )
    dataflow = front(captured)
    flops = sum(work_of(node, dataflow.device).flops for node in dataflow.operators)
    # 4.09 billion multiply-adds for an image (torchvision's table), three times but for the first layer.
    assert flops == pytest.approx(3 * 2 * 4.09e9 * 2, rel=0.02)
    costs = operator_seconds(dataflow, profile_by_name("a100"))
    assert len(costs.seconds) == len(dataflow.operators)
    assert all(seconds >= 5e-6 for seconds in costs.seconds)


def test_markers_of_the_own_loop_cost_nothing(own_loop_dataflow):
    costs = operator_seconds(own_loop_dataflow)
    by_name = dict(zip((node.name for node in own_loop_dataflow.operators), costs.seconds, strict=True))
    free = [name for name, seconds in by_name.items() if seconds == 0]
    assert len(free) == 2
    assert costs.step_seconds == pytest.approx(sum(by_name.values()))
    assert costs.source == "estimated"


@pytest.fixture
def own_loop_dataflow():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    request = StepRequest(model, (images(1)[0][0],), Mode.AUTOGRAD)
    step, _ = compile_step(CompileRequest(request, runs=False))
    return step.dataflow
