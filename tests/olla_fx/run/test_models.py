"""Models of many kinds, trained and run for answers: planned steps equal eager ones."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx.models import build_model, import_torchvision
from tests.olla_fx.helpers import (
    SmallNet,
    Twins,
    assert_same,
    assert_same_models,
    assert_served,
    check_inference,
    images,
    mlp,
    sgd,
    vectors,
)

ADAMW = optim.AdamW
MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9)


class Written(nn.Module):
    """A model whose forward is given: ``forward(self, *inputs)``; tensors become buffers."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.written = forward

    def forward(self, *inputs):
        return self.written(self, *inputs)


def pairs(shape, target, count=3, dtype=torch.float32):
    return [(torch.randn(*shape).to(dtype), torch.randn(*target).to(dtype)) for _ in range(count)]


def sequences(count=3, batch=2, length=4, width=8):
    return [(torch.randn(batch, length, width), torch.randint(width, (batch,))) for _ in range(count)]


def tokens(count=3, size=10, shape=(4, 3), classes=3):
    return [(torch.randint(size, shape), torch.randint(classes, (shape[0],))) for _ in range(count)]


# Inputs and outputs


def test_several_inputs_and_a_nested_one():
    def forward(self, x, more):
        return self.body(x * more["scale"] + more["shift"][0]) * more["times"]

    twins = Twins(Written(forward, body=mlp()), MOMENTUM, example(torch.ones(4, 6)))
    twins.run([example(torch.randn(4, 6)) for _ in range(3)])


def example(x):
    return (
        x,
        {"scale": torch.full((6,), 0.5), "shift": (torch.ones(6), 3), "times": 2},
        torch.tensor([0, 1, 2, 0]),
    )


def test_the_same_tensor_twice_as_input():
    model = Written(lambda self, a, b: self.body(a * b), body=mlp())
    target = torch.tensor([0, 1, 2, 0])
    twins = Twins(model, MOMENTUM, (torch.ones(4, 6), torch.ones(4, 6), target))
    x = torch.randn(4, 6)
    for _ in range(3):
        twins.train((x, x, target))
    twins.compare()


def test_an_example_that_holds_one_tensor_twice():
    model = Written(lambda self, a, b: self.body(a * b), body=mlp())
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    twins = Twins(model, MOMENTUM, (x, x, target))
    for _ in range(3):
        twins.train((x, torch.randn(4, 6), target))
    twins.compare()


def test_views_of_one_storage_as_inputs():
    model = Written(lambda self, a, b: self.body(a * b), body=mlp())
    base, target = torch.randn(4, 12), torch.tensor([0, 1, 2, 0])
    twins = Twins(model, MOMENTUM, (base[:, :6], base[:, 6:], target))
    for _ in range(3):
        other = torch.randn(4, 12)
        torch.manual_seed(0)
        expected = twins.train_eager((other[:, :6], other[:, 6:], target))
        twins.step.poison()
        assert_same(expected, twins.step(other[:, :6], other[:, 6:], target), "loss")
    assert_served(twins.step, 3, 1)
    twins.compare()


def test_inputs_somewhere_in_a_larger_storage():
    model = Written(lambda self, x: self.body(x.as_strided((4, 6), (6, 1)) * 1), body=mlp())
    large, target = torch.randn(8, 6), torch.tensor([0, 1, 2, 0])
    twins = Twins(model, MOMENTUM, (large[:4], target))
    for start in range(3):
        expected = twins.train_eager((large[start : start + 4], target))
        twins.step.poison()
        assert_same(expected, twins.step(large[start : start + 4], target), "loss")
    twins.compare()


def test_an_input_that_the_model_writes_to():
    Twins(
        Written(lambda self, x: self.body(F.relu(x, inplace=True)), body=mlp()), MOMENTUM, vectors(1)[0]
    ).run(vectors(3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (self.body(x), x.sum()),
        lambda self, x: {"logits": self.body(x), "hidden": [self.body[0](x), 7, None]},
        lambda self, x: (self.body(x),) * 2,
        lambda self, x: {"logits": self.body(x), "half": self.body(x)[:2]},
    ],
    ids=["tuple", "dict", "twice", "views"],
)
def test_training_returns_outputs_in_their_structure(forward):
    def loss_fn(answer, target):
        return F.cross_entropy(answer["logits"] if isinstance(answer, dict) else answer[0], target)

    model = Written(forward, body=mlp())
    storages = 3 if isinstance(forward(model, torch.ones(4, 6)), dict) else 2
    leaves = forward(model, torch.ones(4, 6))
    if isinstance(leaves, tuple) and leaves[0] is not leaves[1]:
        storages = 3
    twins = Twins(model, MOMENTUM, vectors(1)[0], loss_fn, return_outputs=True, outputs=storages)
    twins.run(vectors(3))


@pytest.mark.parametrize(
    ("forward", "outputs"),
    [
        (lambda self, x: (self.body(x), x.sum()), 2),
        (lambda self, x: {"logits": self.body(x), "hidden": [self.body[0](x), 7, None]}, 2),
        (lambda self, x: x.view(-1), 0),
        (lambda self, x: x, 0),
        (lambda self, x: (self.body(x), self.body[0].weight.t()), 1),
        (lambda self, x: (self.body(x), self.buffer), 1),
        (lambda self, x: self.body(x).chunk(3, 1), 1),
        (lambda self, x: (x.clone(), self.body(x).clone()), 2),
        (lambda self, x: (self.buffer.add_(1).clone(), self.buffer, self.body(x)), 2),
        (lambda self, x: (self.buffer.clone(), self.buffer.add_(1), self.body(x)), 2),
        (lambda self, x: (self.body(x).expand(5, 4, 3), torch.arange(3)), 2),
    ],
    ids=[
        "tuple", "dict", "view of the input", "the input", "view of a parameter", "a buffer",
        "two outputs in one storage", "clones", "an updated buffer", "a buffer before its update",
        "expanded, and without input",
    ],
)  # fmt: skip
def test_inference_outputs(forward, outputs):
    model = Written(forward, body=mlp(), buffer=torch.zeros(3))
    model.eval()
    eager = copy.deepcopy(model)
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none")
    kept = []
    for calls, (x, _) in enumerate(vectors(3), 1):
        with torch.no_grad():
            expected = eager(x)
        step.poison()
        answer = step(x)
        assert_same(expected, answer, f"answer of call {calls}")
        assert step.binding == "buffer"
        assert step.counts.outputs == outputs
        assert calls == 1 or step.counts.outside == 0
        kept.append((expected, answer))
    step.poison()
    for expected, answer in kept:
        assert_same(expected, answer, "an answer kept by the caller")
    assert_same_models(eager, model)


def test_inference_in_inference_mode():
    model = mlp().eval()
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none")
    with torch.inference_mode():
        for x, _ in vectors(3):
            assert_same(model(x), step(x), "answer")
    with torch.no_grad():
        assert_same(model(x), step(x), "answer outside of inference mode")


# Parameters


def test_tied_weights():
    model = Written(
        lambda self, x: self.out(self.embed(x)).transpose(1, 2),
        embed=nn.Embedding(10, 6),
        out=nn.Linear(6, 10, bias=False),
    )
    model.out.weight = model.embed.weight
    twins = Twins(model, optim.Adam, (torch.zeros(2, 5, dtype=torch.long),) * 2)
    twins.run([(torch.randint(10, (2, 5)), torch.randint(10, (2, 5))) for _ in range(4)])
    assert twins.planned.out.weight is twins.planned.embed.weight


def test_frozen_and_unreached_parameters_get_no_state():
    twins = Twins(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    state = twins.optimizers[1].state
    assert twins.planned.head.weight in state
    assert twins.planned.frozen not in state
    assert twins.planned.unreached not in state


def test_a_frozen_backbone():
    model = SmallNet()
    model.conv.requires_grad_(False)
    model.norm.requires_grad_(False)
    Twins(model, MOMENTUM, images(1)[0]).run(images(3))


# Layers


def recurrent(kind, **options):
    directions = 2 if options.get("bidirectional") else 1
    return Written(
        lambda self, x: self.head(self.body(x)[0][:, -1]),
        body=kind(4, 6, batch_first=True, **options),
        head=nn.Linear(6 * directions, 2),
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.RNN, {}),
        (nn.GRU, {}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.GRU, {"num_layers": 2, "dropout": 0.2}),
    ],
)
def test_recurrent_networks(kind, options):
    Twins(recurrent(kind, **options), MOMENTUM, pairs((2, 3, 4), (2, 2))[0], F.mse_loss).run(
        pairs((2, 3, 4), (2, 2))
    )


def test_lstm_without_onednn():
    batches = pairs((2, 3, 4), (2, 2))
    with torch.backends.mkldnn.flags(enabled=False):
        Twins(recurrent(nn.LSTM, num_layers=2, dropout=0.2), MOMENTUM, batches[0], F.mse_loss).run(batches)


def test_lstm_cell():
    def forward(self, x):
        hidden = cell = torch.zeros(2, 6)
        for time in range(3):
            hidden, cell = self.cell(x[:, time], (hidden, cell))
        return self.head(hidden)

    model = Written(forward, cell=nn.LSTMCell(4, 6), head=nn.Linear(6, 2))
    Twins(model, ADAMW, pairs((2, 3, 4), (2, 2))[0], F.mse_loss).run(pairs((2, 3, 4), (2, 2)))


def test_lstm_inference():
    check_inference(nn.LSTM(4, 6, 2), [(torch.randn(3, 2, 4),) for _ in range(3)], 3)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention(need_weights):
    model = Written(
        lambda self, x: self.body(x, x, x, need_weights=need_weights)[0].mean(1),
        body=nn.MultiheadAttention(8, 2, dropout=0.1 * need_weights, batch_first=True),
    )
    Twins(model, ADAMW, sequences(1)[0]).run(sequences())


def test_transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Written(lambda self, x: self.body(x).mean(1), body=nn.TransformerEncoder(layer, 2))
    Twins(model, ADAMW, sequences(1)[0]).run(sequences())


class UNet(nn.Module):
    def __init__(self, mode=None):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.narrow = nn.Conv2d(8, 4, 1)
        self.out = nn.Conv2d(8, 3, 1)
        self.mode = mode

    def forward(self, x):
        shallow = F.relu(self.down(x), inplace=True)
        deep = self.norm(F.relu(self.deep(F.max_pool2d(shallow, 2)), inplace=True))
        if self.mode is None:
            up = self.up(deep)
        else:
            up = F.interpolate(self.narrow(deep), scale_factor=2.0, mode=self.mode)
        return self.out(torch.cat([shallow, up], 1))


@pytest.mark.parametrize("mode", [None, "nearest", "bilinear", "bicubic"])
def test_u_net(mode):
    batches = pairs((2, 3, 8, 8), (2, 3, 8, 8))
    Twins(UNet(mode), ADAMW, batches[0], F.mse_loss).run(batches)


def classifier(*layers, width=144):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 5))


@pytest.mark.parametrize(
    "model",
    [
        classifier(nn.Dropout2d(0.3), nn.Conv2d(3, 4, 3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.3)),
        classifier(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
        classifier(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        classifier(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU6(True), nn.Hardswish(True)),
        classifier(nn.Conv2d(3, 4, 3, 2), nn.ConvTranspose2d(4, 3, 3), nn.LeakyReLU(0.1, True), width=75),
        classifier(nn.Flatten(1, 2), nn.Conv1d(24, 4, 3, padding=1, padding_mode="circular"), width=32),
        classifier(nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8), nn.GELU(), width=192),
        classifier(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, 2), nn.MaxPool3d(2), width=18),
    ],
    ids=["dropouts", "free", "instance", "in place", "autoencoder", "conv1d", "layer norm", "conv3d"],
)
def test_layers(model):
    Twins(model, MOMENTUM, images(1)[0]).run(images(4))


@pytest.mark.parametrize("p", [0.04, 0.085, 0.1, 0.857, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dropout_scales_as_eager_does(p, dtype):
    """1 / (1 - p) in double precision and then rounded is not always 1 divided by a rounded 1 - p."""
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(p), nn.Linear(64, 3)).to(dtype)
    batches = [(x.to(dtype), y) for x, y in vectors(2)]
    Twins(model, MOMENTUM, batches[0]).run(batches)


def test_one_batch_norm_used_twice():
    def forward(self, x):
        return self.head(self.norm(self.second(F.relu(self.norm(self.first(x))))).flatten(1))

    model = Written(
        forward,
        first=nn.Conv2d(3, 4, 3),
        second=nn.Conv2d(4, 4, 1),
        norm=nn.BatchNorm2d(4),
        head=nn.Linear(144, 5),
    )
    Twins(model, MOMENTUM, images(1)[0]).run(images(4))


@pytest.mark.parametrize(
    "body",
    [
        nn.EmbeddingBag(10, 6, mode="mean"),
        nn.Sequential(
            nn.Embedding(10, 6, padding_idx=0, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(18, 6)
        ),
    ],
    ids=["bag", "padding"],
)
def test_embeddings(body):
    Twins(nn.Sequential(body, nn.Linear(6, 3)), ADAMW, tokens(1)[0]).run(tokens())


# Operators


def indexing(self, x):
    x = self.body(x)
    x = x[:, torch.tensor([0, 2, 1])]
    zeros = torch.zeros(4, 3)
    zeros[torch.arange(4), torch.tensor([0, 1, 2, 0])] = x.mean(1)
    x = torch.where(x > 0, x + zeros, x * 0.1)
    x = x.scatter_add(1, torch.zeros(4, 3, dtype=torch.long), x).masked_fill(x > 2, 2.0)
    x = torch.einsum("ij,kj->ik", x, self.weight).cumsum(1)
    return (
        x.flip(0).roll(1, 0) + x.sort(1)[0] + x.topk(3)[0] + x.gather(1, torch.zeros(4, 3, dtype=torch.long))
    )


def writing(self, x):
    x = self.body(x)
    x[:, 0] = x[:, 1] * 2
    x[1:, 1:].mul_(0.5)
    copy = x.clone()
    copy += 1
    return copy * x @ self.weight


def drawing(self, x):
    x = self.body(x + torch.randn_like(x) + torch.rand(6))
    x = x + torch.normal(torch.zeros(3), torch.ones(3)) + torch.empty(3).uniform_() + torch.randperm(3)
    x = (
        x
        + torch.empty(3).exponential_()
        + torch.poisson(torch.ones(3))
        + torch.bernoulli(torch.full((3,), 0.5))
    )
    return F.gumbel_softmax(F.rrelu(x, training=True) @ self.weight, hard=True)


def frequencies(self, x):
    return torch.fft.irfft(
        torch.fft.rfft(self.body(x)) * torch.view_as_complex(self.weight[:2, :2].contiguous()), n=3
    )


def penalty(self, x):
    x = x.detach().requires_grad_()
    answer = self.body(x)
    (gradient,) = torch.autograd.grad(answer.sum(), x, create_graph=True)
    return answer + (gradient**2).mean() * self.weight.sum()


def constants(self, x):
    return (
        self.body(x) * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) + self.weight.sum() * torch.ones(4, 3)
    )


def numbers(self, x):
    return self.body(x) * x.max().item() + self.weight.sum()


def hooked(self, x):
    x = self.body(x) @ self.weight
    x.register_hook(lambda gradient: gradient * 2)
    return x


def inner_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (self.body(x) @ self.weight).float()


def checkpointed(self, x):
    x = torch.utils.checkpoint.checkpoint(lambda y: F.dropout(self.body(y), 0.3), x, use_reentrant=False)
    return x @ self.weight


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient * (x.abs() < 1)


def straight_through(self, x):
    return Sign.apply(self.body(x)) @ self.weight


def linear_algebra(self, x):
    square = self.weight @ self.weight.t() + torch.eye(3)
    return self.body(x) * torch.logdet(square) + torch.linalg.svdvals(square)


@pytest.mark.parametrize(
    "forward",
    [
        indexing, writing, drawing, frequencies, penalty, constants, numbers, hooked, inner_autocast,
        checkpointed, straight_through, linear_algebra,
    ],
)  # fmt: skip
def test_operators(forward):
    model = Written(forward, body=mlp(), weight=nn.Parameter(torch.randn(3, 3)))
    Twins(model, MOMENTUM, vectors(1)[0]).run(vectors(4))


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.7])),
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.7]), label_smoothing=0.1),
        lambda answer, target: F.nll_loss(answer.log_softmax(1), target).reshape(1),
        lambda answer, target: F.multi_margin_loss(answer, target),
    ],
    ids=["weighted", "weighted and smoothed", "one element", "margin"],
)
def test_losses(loss_fn):
    Twins(mlp(), MOMENTUM, vectors(1)[0], loss_fn).run(vectors(3))


# Buffers


def codebook(self, x):
    x = self.body(x)
    nearest = torch.cdist(x, self.codes).argmin(1)
    chosen = F.one_hot(nearest, 4).float()
    with torch.no_grad():
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes.mul_(0.9).add_(chosen.t() @ x, alpha=0.1)
        self.codes /= self.counts.unsqueeze(1) + 1
        self.steps += 1
        self.last.copy_(x[0])
        self.noise.normal_()
    return x + (self.codes[nearest] - x).detach() + self.noise


def test_buffers_that_the_model_updates_itself():
    model = Written(
        codebook,
        body=mlp(),
        codes=torch.randn(4, 3),
        counts=torch.ones(4),
        steps=torch.zeros((), dtype=torch.long),
        noise=torch.zeros(3),
    )
    model.register_buffer("last", torch.zeros(3), persistent=False)
    twins = Twins(model, MOMENTUM, vectors(1)[0]).run(vectors(5))
    assert twins.planned.steps == 5


def test_a_plain_tensor_attribute_that_the_model_updates():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = mlp(), torch.zeros(3)

        def forward(self, x):
            self.calls.add_(1)
            return self.body(x) * self.calls

    twins = Twins(Counting(), MOMENTUM, vectors(1)[0]).run(vectors(3))
    assert_same(twins.eager.calls, twins.planned.calls, "calls")


@pytest.mark.parametrize(
    "update",
    [
        lambda table: table.copy_(table.index_put((torch.tensor([1, 2, 0]),), table)),
        lambda table: table.copy_(torch.addmm(table, table, table)),
        lambda table: table.mul_(table),
        lambda table: table.copy_(table.t().clone()),
        lambda table: table.copy_(table + table.t()),
        lambda table: table[1:].copy_(table[:-1].clone()),
        lambda table: table.copy_(table.cumsum(0)),
        lambda table: table.sub_(table.mean()),
    ],
    ids=["index_put", "addmm", "mul", "transpose", "add transposed", "shift", "cumsum", "mean"],
)
def test_buffers_updated_from_themselves(update):
    def forward(self, x):
        with torch.no_grad():
            update(self.table)
        return self.body(x) + self.table.sum()

    Twins(Written(forward, body=mlp(), table=torch.rand(3, 3) / 4), MOMENTUM, vectors(1)[0]).run(vectors(4))


# Types and layouts


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
def test_element_types(dtype, make):
    batches = [(x.to(dtype), y) for x, y in vectors(3)]
    Twins(mlp().to(dtype), make, batches[0]).run(batches)


def test_gradients_in_another_layout_than_activations():
    """The gradient of a mean comes in rows, activations do not: fake tensors err about what both give."""
    form = torch.channels_last_3d
    layers = (
        nn.Conv3d(2, 4, 3),
        nn.BatchNorm3d(4),
        nn.ELU(inplace=True),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
    )
    batches = [(torch.randn(2, 2, 6, 6, 6).to(memory_format=form), torch.randint(4, (2,))) for _ in range(3)]
    Twins(nn.Sequential(*layers).to(memory_format=form), MOMENTUM, batches[0]).run(batches)


def bernoulli_in_place(model, x):
    """Eager draws in the order of memory, in a slice and in the mask of ``Dropout(0.3)``, too."""
    hidden = F.dropout(model.body(x), 0.3)
    mask = torch.zeros_like(hidden)
    mask[:, :, 1:].bernoulli_(0.5)
    return F.alpha_dropout(hidden * mask, 0.2, training=True).mean((2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_in_the_order_of_memory(dtype):
    form = torch.channels_last
    batches = [(x.to(dtype, memory_format=form), target) for x, target in images(3)]
    body = nn.Conv2d(3, 5, 3).to(dtype, memory_format=form)
    Twins(Written(bernoulli_in_place, body=body), MOMENTUM, batches[0]).run(batches)


@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
@pytest.mark.parametrize("inputs_too", [True, False])
def test_channels_last(make, inputs_too):
    form = torch.channels_last if inputs_too else torch.contiguous_format
    batches = [(x.to(memory_format=form), y) for x, y in images(3)]
    Twins(SmallNet().to(memory_format=torch.channels_last), make, batches[0]).run(batches)


def test_mixed_training_flags():
    model = SmallNet()
    model.norm.eval()
    Twins(model, MOMENTUM, images(1)[0]).run(images(3))


# Hooks that torch itself hangs on modules


def normalized(wrap):
    return nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_reparametrised_weights(wrap):
    eager, planned = normalized(wrap), normalized(wrap)
    eager.load_state_dict(planned.state_dict())
    one, other = sgd(eager.parameters()), sgd(planned.parameters())
    step = olla_fx.optimize(planned, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=other, solver="none")
    for calls, (x, y) in enumerate(vectors(4), 1):
        one.zero_grad()
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        one.step()
        step.poison()
        assert_same(loss.detach(), step(x, y), "loss")
        assert_served(step, calls, 1)
    assert_same_models(eager, planned)


# Whole architectures


def test_kernels_whose_requests_depend_on_data_fall_through():
    """The matrix exponential picks its method by the norm: what was not recorded is served outside."""
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
    twins = Twins(nn.Sequential(orthogonal, nn.Tanh(), nn.Linear(6, 3)), MOMENTUM, vectors(1)[0])
    for x, y in vectors(5):
        expected = twins.train_eager((x, y))
        twins.step.poison()
        assert_same(expected, twins.step(x, y), "loss")
        assert twins.step.binding == "buffer"
        assert twins.step.counts.served > 0
    twins.compare()


@pytest.mark.parametrize("make", [sgd, ADAMW])
def test_resnet18(make):
    model = import_torchvision().models.resnet18(num_classes=5)
    Twins(model, make, images(1, 2, 32)[0]).run(images(3, 2, 32))


@pytest.mark.parametrize(
    ("name", "size"),
    [("mobilenet_v2", 32), ("squeezenet1_1", 64), ("shufflenet_v2_x0_5", 64), ("efficientnet_b0", 32)],
)
def test_torchvision_models(name, size):
    model = import_torchvision().models.get_model(name, num_classes=5)
    Twins(model, MOMENTUM, images(1, 2, size)[0]).run(images(3, 2, size))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t", "densenet121", "mnasnet0_5", "regnet_y_400mf"])
def test_larger_torchvision_models(name):
    model = import_torchvision().models.get_model(name, num_classes=5)
    Twins(model, MOMENTUM, images(1, 2, 64)[0]).run(images(3, 2, 64))


def test_vision_transformer():
    transformer = import_torchvision().models.VisionTransformer(
        image_size=16,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout=0.1,
        num_classes=5,
    )
    Twins(transformer, ADAMW, images(1, 2, 16)[0]).run(images(3, 2, 16))


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_transformers_models(architecture):
    case = build_model(f"transformers:{architecture}", batch_size=2, tokens=5)
    ids, target = case.inputs
    batches = [
        (torch.randint(2, 1000, ids.shape), torch.randint(int(target.max()) + 1, target.shape))
        for _ in range(3)
    ]
    Twins(case.model, ADAMW, case.inputs, case.loss_fn).run(batches)


def test_transformers_inference_returns_its_own_structure():
    case = build_model("transformers:bert", batch_size=2, tokens=5, train=False)
    step = check_inference(case.model, [case.inputs, case.inputs, case.inputs], 1)
    assert type(step(*case.inputs)) is type(case.model(*case.inputs))
