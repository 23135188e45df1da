"""Rewrites of activations and poolings: what they change, what they leave, and the same bits."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx.passes import run_passes
from olla_fx.passes.rewrites import Wanted
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.pooling import PACKED
from olla_fx.rewrites import REWRITES
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import Written, captured_training, images, sgd

aten = torch.ops.aten


def probe():
    return Probe(torch.device("cpu"), True, lambda question, answer: answer())


def changes(model, *names, size=16, dtype=torch.float32):
    """Return how often each of some rewrites changes a model's training step."""
    x, y = images(1, size=size)[0]
    captured = captured_training(model.to(dtype), (x.to(dtype), y))
    rewritten = run_passes(captured, Wanted(names or REWRITES, probe()))
    rewritten.graph_module.graph.lint()
    return dict(Counter(change.rewrite for change in rewritten.changes))


def conv(inputs=3, outputs=4):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def head(channels=4):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


def sequence(*middle, channels=4):
    return nn.Sequential(conv(), *middle, head(channels))


class Fire(nn.Module):
    """Two activations that are concatenated, as in SqueezeNet."""

    def __init__(self, inputs=4, after=None):
        super().__init__()
        self.squeeze, self.left, self.right = conv(inputs), conv(4), conv(4)
        self.after = after or conv(8)

    def forward(self, x):
        x = self.squeeze(x).relu()
        return self.after(torch.cat([self.left(x).relu(), self.right(x).relu()], 1))


POOLINGS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, padding=1),
    nn.MaxPool2d(3, 1, ceil_mode=True),
    nn.AdaptiveMaxPool2d(3),
]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: sequence(nn.ReLU6()), {"activation_outputs": 1}),
        (lambda: sequence(nn.Hardtanh(-0.5, 2.0, inplace=True)), {"activation_outputs": 1}),
        (lambda: sequence(nn.LeakyReLU(0.1)), {"activation_outputs": 1}),
        (lambda: sequence(nn.LeakyReLU(0.0)), {}),
        (lambda: sequence(nn.LeakyReLU(-0.1)), {}),
        (lambda: sequence(nn.Hardsigmoid()), {}),
        (
            lambda: sequence(nn.ReLU(), nn.MaxPool2d(2), conv(4)),
            {"masks_behind_pooling": 1, "unread_arguments": 1, "narrow_indices": 1},
        ),
        (lambda: sequence(nn.AvgPool2d(2), conv(4)), {"unread_arguments": 1}),
        (lambda: sequence(nn.ReLU(), nn.Dropout(0.5), conv(4)), {"boolean_masks": 1, "packed_masks": 2}),
        (lambda: nn.Sequential(conv(3), Fire(), head(4)), {"slices_of_cat": 2}),
        (
            lambda: nn.Sequential(conv(3), Fire(after=nn.MaxPool2d(2)), conv(8), head(4)),
            {"masks_behind_pooling": 1, "unread_arguments": 1, "narrow_indices": 1},
        ),
    ],
)
def test_what_is_changed(model, expected):
    assert changes(model()) == expected


def shared(self, x):
    """A pooled activation that something else reads, too."""
    x = self.first(x).relu()
    return self.head(nn.functional.max_pool2d(x, 2).mean() + self.second(x))


def clamped_and_kept(self, x):
    """The input of an activation that backward needs anyway."""
    x = self.first(x)
    return self.head(nn.functional.relu6(x) * x.exp())


@pytest.mark.parametrize(
    ("forward", "name"), [(shared, "masks_behind_pooling"), (clamped_and_kept, "activation_outputs")]
)
def test_what_is_read_otherwise_stays(forward, name):
    model = Written(forward, first=conv(), second=conv(4), head=head())
    assert name not in changes(model)


@pytest.mark.parametrize(("pooling", "bits"), [(POOLINGS[0], 2), (POOLINGS[1], 4), (POOLINGS[2], 4)], ids=str)
def test_positions_are_kept_in_as_few_bits_as_their_window_allows(pooling, bits):
    captured = captured_training(sequence(nn.ReLU(), pooling, conv(4)), images(1, size=16)[0])
    for names in (["narrow_indices"], ["unread_arguments", "narrow_indices"]):
        graph = run_passes(captured, Wanted(names, probe())).graph_module.graph
        target = PACKED[aten.max_pool2d_with_indices.default]
        (node,) = graph.find_nodes(op="call_function", target=target)
        assert node.args[-2:] == (bits, False)
        maxima, places = node.meta["val"]
        assert places.numel() * 8 == maxima.numel() * bits


@pytest.mark.parametrize("size", [16, 17, 32])
def test_positions_of_adaptive_poolings_are_as_narrow_as_their_plane_allows(size):
    captured = captured_training(sequence(nn.ReLU(), POOLINGS[3], conv(4)), images(1, size=size)[0])
    graph = run_passes(captured, Wanted(["narrow_indices"], probe())).graph_module.graph
    copies = graph.find_nodes(op="call_function", target=aten._to_copy.default)
    dtypes = [node.kwargs["dtype"] for node in copies]
    assert dtypes == [torch.uint8 if size == 16 else torch.int16, torch.int64]


class Volumes(nn.Sequential):
    """Pools volumes."""

    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.ReLU(),
            nn.Conv3d(4, 4, 3, padding=1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 5),
        )  # fmt: skip


MODELS = {
    "clamped": lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU6(inplace=True), conv(4), head()),
    "leaky": lambda: sequence(nn.LeakyReLU(0.2, inplace=True), conv(4)),
    "fire": lambda: nn.Sequential(conv(3), Fire(), nn.ReLU(), head(4)),
    "pooled fire": lambda: nn.Sequential(conv(3), Fire(after=nn.MaxPool2d(3, 2)), conv(8), head(4)),
    "dropout": lambda: sequence(nn.ReLU(), nn.Dropout(0.5), conv(4)),
    "volumes": Volumes,
    "means": lambda: sequence(nn.AvgPool2d(3, 1, padding=1), conv(4)),
    **{
        str(pooling): lambda pooling=pooling: sequence(nn.ReLU(), pooling, conv(4), nn.ReLU())
        for pooling in POOLINGS
    },
}


@pytest.mark.parametrize("kind", [WholeStep, OwnLoop])
@pytest.mark.parametrize("name", MODELS)
def test_bits(name, kind):
    batches = images(3, size=16)
    if kind is WholeStep:
        WholeStep(MODELS[name](), sgd, batches[0]).run(batches)
    else:
        OwnLoop(MODELS[name](), batches[0][:1]).run(batches).assert_served()


@pytest.mark.parametrize("name", MODELS)
def test_bits_in_16_bits(name):
    batches = [(x.bfloat16(), y) for x, y in images(2, size=16)]
    WholeStep(MODELS[name]().bfloat16(), sgd, batches[0]).run(batches)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "volumes"])
def test_bits_channels_last(name):
    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in images(2, size=16)]
    model = MODELS[name]().to(memory_format=torch.channels_last)
    WholeStep(model, sgd, batches[0]).run(batches)


INFINITE = float("nan"), float("inf"), -float("inf")
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 6.0, 7.0, *INFINITE, 1e-45, -1e-45])


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_special_values_of_activations():
    x = SPECIAL.repeat_interleave(len(SPECIAL))
    gradient = SPECIAL.repeat(len(SPECIAL))
    clamped = aten.hardtanh_backward(gradient, x, 0.0, 6.0)
    assert same(clamped, aten.hardtanh_backward(gradient, x.clamp(0.0, 6.0), 0.0, 6.0))
    leaky = aten.leaky_relu_backward(gradient, x, 0.1, False)
    assert same(leaky, aten.leaky_relu_backward(gradient, aten.leaky_relu(x, 0.1), 0.1, True))
    masked = aten.threshold_backward(gradient, x, 0)
    assert same(masked, gradient.masked_fill(x <= 0, 0))


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 1), (3, 2)])
def test_special_values_behind_poolings(kernel, stride):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = SPECIAL[torch.randint(len(SPECIAL), (2, 3, 9, 9), generator=generator)].relu()
        pooled, indices = aten.max_pool2d_with_indices(x, [kernel], [stride])
        gradient = torch.randn(pooled.shape, generator=generator)
        spread = [[kernel], [stride], [0], [1], False, indices]
        eager = aten.threshold_backward(aten.max_pool2d_with_indices_backward(gradient, x, *spread), x, 0)
        masked = aten.threshold_backward(gradient, pooled, 0)
        assert same(eager, aten.max_pool2d_with_indices_backward(masked, x, *spread))


def test_a_plan_says_what_was_rewritten():
    batch = images(1, size=16)[0]
    step = WholeStep(MODELS["pooled fire"](), sgd, batch).step
    told = step.plan.report()
    assert "rewritten: masks behind pooling" in told
    assert type(step.plan).from_json(step.plan.to_json()).changes == step.plan.changes


def test_rewrites_can_be_chosen():
    batches = images(2, size=16)
    none = WholeStep(MODELS["pooled fire"](), sgd, batches[0], rewrites="none").run(batches)
    assert none.step.plan.changes == ()
    one = WholeStep(MODELS["pooled fire"](), sgd, batches[0], rewrites=["masks_behind_pooling"]).run(batches)
    assert {change.rewrite for change in one.step.plan.changes} <= {"masks_behind_pooling"}


@pytest.mark.parametrize("name", ["clamped", "fire", "pooled fire", "dropout", str(POOLINGS[1])])
def test_the_peak_falls(name):
    batch = images(1, batch=8, size=32)[0]
    peaks = [
        WholeStep(MODELS[name](), sgd, batch, rewrites=rewrites).step.plan.peak_bytes
        for rewrites in ("none", "all")
    ]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    "activation", [nn.ReLU6(), nn.LeakyReLU(0.1), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))]
)
def test_outputs_that_the_caller_changes(activation):
    """Eager's backward does not read them."""
    torch.manual_seed(0)
    model = nn.Sequential(conv(), activation)
    eager = copy.deepcopy(model)
    x = images(1, size=16)[0][0]
    step = olla_fx.optimize(model, x, fallback="raise")
    for _ in range(3):
        for side in (eager, step):
            side.zero_grad()
            answer = side(x)
            loss = answer.sum()
            answer.data.zero_()
            loss.backward()
        assert all(
            torch.equal(one.grad, other.grad)
            for one, other in zip(eager.parameters(), model.parameters(), strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limits", [(-0.7, 0.7), (-0.1, 0.9), (-1.0, 0.5)])
def test_limits_that_a_type_does_not_have(limits, dtype):
    expected = {"activation_outputs": 1} if limits == (-1.0, 0.5) else {}
    assert changes(sequence(nn.Hardtanh(*limits)), dtype=dtype) == expected
    batches = [(x.to(dtype), y) for x, y in images(2, size=16)]
    WholeStep(sequence(nn.Hardtanh(*limits), conv(4)).to(dtype), sgd, batches[0]).run(batches)


def test_thresholds_that_a_type_does_not_have():
    model = sequence(nn.Threshold(0.3, 0.0), nn.Dropout(0.5), conv(4))
    assert "boolean_masks" not in changes(model, dtype=torch.bfloat16)


def growing(self, x):
    x = self.first(x)
    return self.head(self.last(torch.cat([torch.tensor([]), self.left(x).relu(), self.right(x).relu()], 1)))


def test_empty_tensors_among_the_parts_of_a_cat():
    model = Written(growing, first=conv(), left=conv(4), right=conv(4), last=conv(8), head=head())
    batches = images(2, size=16)
    WholeStep(model, sgd, batches[0]).run(batches)


def test_sizes_that_vary():
    model = nn.Sequential(
        conv(), nn.ReLU(), nn.MaxPool2d(3, 2), conv(4), nn.ReLU6(), nn.AvgPool2d(2), conv(4),
        nn.ReLU(), nn.Dropout(0.5), conv(4), head(),
    )  # fmt: skip
    batches = [images(1, batch=batch, size=size)[0] for batch, size in ((2, 16), (3, 20), (5, 28), (2, 24))]
    pair = WholeStep(model, sgd, batches[0]).run([batch for batch in batches for _ in range(2)])
    assert pair.step.stats.families == 1
    names = {change.rewrite for change in pair.step.plan.changes}
    assert names == {
        "activation_outputs", "masks_behind_pooling", "unread_arguments", "boolean_masks", "narrow_indices"
    }  # fmt: skip
