"""Batch norms made again from their statistics: the bits of the first run, and where that is possible."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.normalization import batch_norm_again, normalized_again
from olla_fx.passes import run_passes
from olla_fx.passes.rewrites.probes import Probe
from tests.olla_fx.helpers import captured_training, images

aten = torch.ops.aten
SHAPES = [(4, 16, 28, 28), (8, 7, 5, 5), (4, 8, 1, 1), (16, 10), (3, 5, 11), (2, 3, 4, 5, 6), (2, 1, 9, 9)]
ACTIVATIONS = {
    "none": (lambda x: x, (-math.inf, math.inf)),
    "relu": (torch.relu, (0.0, math.inf)),
    "relu6": (F.relu6, (0.0, 6.0)),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 1.5), (-0.5, 1.5)),
}


def with_zeros(x):
    x[:, 0], x[:, -1] = 0.0, -0.0
    return x


def with_special(x):
    x[0, 0].view(-1)[:1] = float("nan")
    x[-1, -1].view(-1)[-1:] = math.inf
    return x


def in_order(x, channels_last):
    orders = {4: torch.channels_last, 5: torch.channels_last_3d} if channels_last else {}
    return x.contiguous(memory_format=orders.get(x.dim(), torch.contiguous_format))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("values", [lambda x: x, with_zeros, with_special], ids=["any", "zeros", "special"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(shape, affine, values, channels_last):
    torch.manual_seed(0)
    x = in_order(values(torch.randn(shape) * 3 + 1), channels_last)
    channels = shape[1]
    weight, bias = torch.randn(2, channels) if affine else (None, None)
    if affine:
        weight[0], bias[0], bias[-1] = 0.0, -0.0, -0.0
    running = torch.zeros(channels), torch.ones(channels)
    first, mean, inverse = aten._native_batch_norm_legit(x, weight, bias, *running, True, 0.1, 1e-5)
    for activation, limits in ACTIVATIONS.values():
        again, expected = batch_norm_again(x, weight, bias, mean, inverse, *limits), activation(first)
        assert again.stride() == expected.stride()
        assert torch.equal(again.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", ["equal_from_statistics", "equal_without_statistics"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_probe(kind, channels_last):
    questions = []
    source = in_order(torch.empty(5, 37, 15, 15), channels_last)

    def remember(question, answer):
        questions.append(question)
        return answer()

    assert getattr(Probe(torch.device("cpu"), True, remember), kind)(source)
    assert len(questions) == 1
    assert getattr(Probe(torch.device("cpu"), False, remember), kind)(source)
    assert len(questions) == 1


@pytest.mark.parametrize(
    ("activation", "limits"),
    [
        (nn.ReLU(), (0.0, math.inf)),
        (nn.ReLU(inplace=True), (0.0, math.inf)),
        (nn.ReLU6(), (0.0, 6.0)),
        (nn.Hardtanh(), (-1.0, 1.0)),
        (nn.Hardtanh(-0.5, 0.1), None),
        (nn.SiLU(), None),
    ],
    ids=str,
)
def test_where_it_applies(activation, limits):
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), activation, *head)
    captured = captured_training(model, images(1, size=16)[0])
    graph = run_passes(captured).graph_module.graph
    (norm,) = graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit.default)
    normalized = next(user for user in norm.users if user.args[1] == 0)
    behind = next(user for user in normalized.users if user.target is not aten.native_batch_norm_backward)
    alone = normalized_again(norm)
    assert alone is not None
    assert (alone.args[-2:], tuple(alone.source.shape)) == ((-math.inf, math.inf), (2, 4, 14, 14))
    both = normalized_again(norm, behind)
    assert (both is None) == (limits is None)
    if both is not None:
        assert both.args[:3] == norm.args[:3]
        assert both.args[-2:] == limits
        assert [node.args for node in both.args[3:5]] == [(norm, 1), (norm, 2)]


def test_where_it_does_not_apply():
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *head).double()
    x, y = images(1, size=16)[0]
    graph = run_passes(captured_training(model, (x.double(), y))).graph_module.graph
    (norm,) = graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit.default)
    assert normalized_again(norm) is None
