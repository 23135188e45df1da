"""Steps in which arrays are dropped and made again: the same bits, whatever is dropped."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.errors import BackwardError
from tests.olla_fx.dropping import Dropping
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import ADAMW, MOMENTUM, Written, images, sgd, vectors


@pytest.fixture
def dropping(monkeypatch):
    return Dropping(monkeypatch)


def conv(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def head(channels):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


class Residual(nn.Module):
    """Activations in place, a sum in place, batch norms with running statistics."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.second = conv(channels, channels), conv(channels, channels)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        inner = self.norms[1](self.second(self.act(self.norms[0](self.first(x)))))
        inner += x
        return self.act(inner)


def frozen(channels):
    """Batch norms with given statistics, which write over their inputs."""
    block = Residual(channels)
    for norm in block.norms:
        norm.eval().requires_grad_(False)
        norm.train = lambda mode=True, norm=norm: norm
    return block


class Skip(nn.Module):
    """A U-Net of one level: what the first half makes is read again at the end."""

    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = conv(3, 4), conv(4, 6), conv(10, 4)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.norm(self.down(x)).relu()
        deep = self.deep(F.max_pool2d(x, 2)).relu()
        return self.up(torch.cat([x, F.interpolate(deep, scale_factor=2)], 1)).relu()


class Transformer(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(16, 2, 32, dropout, F.gelu, batch_first=True, norm_first=first)
                for first in (True, False)
            ]
        )
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)


class Recurrent(nn.Module):
    """Gates in place on slices of one matrix."""

    def __init__(self, kind=nn.LSTMCell):
        super().__init__()
        self.cell, self.head = kind(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        state = None
        for time in range(2):
            state = self.cell(x * (time + 1), state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Layers(nn.Module):
    """A recurrent layer of PyTorch's own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 8, 2, batch_first=True, dropout=0.2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Shared(nn.Module):
    """One layer three times."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        for _ in range(3):
            x = x + F.gelu(self.layer(self.norm(x)))
        return self.head(x)


def tokens(count):
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randint, generator=generator)
    return [(draw(11, (2, 7)), draw(11, (2,))) for _ in range(count)]


def sequences(count):
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(2, 5, 6, generator=generator), torch.randint(3, (2,), generator=generator))
        for _ in range(count)
    ]


MODELS = {
    "residual": (
        lambda: nn.Sequential(conv(3, 4), Residual(4), nn.Dropout(0.3), Residual(4), head(4)), images),
    "frozen": (lambda: nn.Sequential(conv(3, 4), frozen(4), nn.GELU(), frozen(4), head(4)), images),
    "skip": (lambda: nn.Sequential(Skip(), head(4)), images),
    "activations": (
        lambda: nn.Sequential(
            conv(3, 4), nn.SiLU(True), nn.GroupNorm(2, 4), conv(4, 4), nn.ELU(inplace=True), conv(4, 4),
            nn.Hardswish(True), nn.BatchNorm2d(4, track_running_stats=False), nn.Dropout2d(0.2),
            nn.LeakyReLU(0.1, True), nn.MaxPool2d(2), conv(4, 4), nn.ReLU6(True), head(4),
        ),
        images,
    ),
    "transformer": (Transformer, tokens),
    "lstm cell": (Recurrent, vectors),
    "gru cell": (partial(Recurrent, nn.GRUCell), vectors),
    "lstm": (Layers, sequences),
    "shared": (Shared, vectors),
}  # fmt: skip


OPTIMIZERS = (sgd, MOMENTUM, ADAMW)


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_whole_steps(number, name, dropping):
    torch.manual_seed(0)
    make, batches = MODELS[name][0], MODELS[name][1](3)
    WholeStep(make(), OPTIMIZERS[number % 3], batches[0]).run(batches)
    assert len(dropping.repeated[0]) > 4


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_random_drops(name, seed, dropping):
    torch.manual_seed(seed)
    dropping(share=0.6 - 0.2 * seed, again=0.3, seed=seed)
    make, batches = MODELS[name][0], MODELS[name][1](2)
    WholeStep(make(), MOMENTUM, batches[0], rewrites="all" if seed else "none").run(batches)


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_own_loop(number, name, dropping):
    torch.manual_seed(0)
    dropping(share=1 - 0.1 * number, again=0.1 * number, seed=number)
    make, batches = MODELS[name][0], MODELS[name][1](4)
    OwnLoop(make(), batches[0][:1]).run(batches).assert_served()
    assert dropping.repeated[0]


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_compiled_models(name, dropping):
    torch.manual_seed(0)
    make, batches = MODELS[name][0], MODELS[name][1](3)
    pair = CompiledLoop(make()).run(batches)
    pair.assert_served(1)
    assert dropping.repeated[0]


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_micro_batches(name, dropping):
    torch.manual_seed(0)
    make, batches = MODELS[name][0], MODELS[name][1](3)
    model = make()
    step = olla_fx.optimize(
        model, batches[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), accumulation_steps=2,
        fallback="raise", solver="none",
    )  # fmt: skip
    eager = copy.deepcopy(model)
    optimizer = sgd(eager.parameters())
    for number, (x, y) in enumerate(batches):
        torch.manual_seed(number)
        given = step(x, y)
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses = []
        for part, target in zip(x.split(1), y.split(1), strict=True):
            loss = F.cross_entropy(eager(part), target) / 2
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        assert torch.equal(given, sum(losses))
        for one, other in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
            assert torch.equal(one, other)
    assert any(dropping.repeated)


def test_inference_has_nothing_to_repeat(dropping):
    check_inference(MODELS["residual"][0](), [batch[:1] for batch in images(3)], 1)
    assert not dropping.repeated


def test_sizes_that_vary(dropping):
    batches = [images(1, batch=batch, size=size)[0] for batch, size in ((2, 8), (3, 12), (5, 16), (2, 10))]
    for name in ("residual", "activations"):
        torch.manual_seed(0)
        pair = WholeStep(MODELS[name][0](), sgd, batches[0]).run([each for each in batches for _ in range(2)])
        assert pair.step.stats.families == 1
    assert all(len(repeated) > 4 for repeated in dropping.repeated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype, dropping):
    torch.manual_seed(0)
    batches = [(x.to(dtype), y) for x, y in images(2)]
    WholeStep(MODELS["residual"][0]().to(dtype), sgd, batches[0]).run(batches)
    replayed = "olla_fx.dropout_backward.default" in dropping.repeated[0]
    assert replayed == (dtype is torch.float64)


def test_channels_last(dropping):
    torch.manual_seed(0)
    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in images(2)]
    WholeStep(MODELS["residual"][0]().to(memory_format=torch.channels_last), sgd, batches[0]).run(batches)


def test_autocast(dropping):
    torch.manual_seed(0)
    batches = images(3)
    context = partial(torch.autocast, "cpu", torch.bfloat16)
    OwnLoop(MODELS["residual"][0](), batches[0][:1], context=context).run(batches).assert_served()


def checkpointed(self, x):
    x = self.first(x)
    x = torch.utils.checkpoint.checkpoint(self.middle, x, use_reentrant=False)
    return self.last(x.relu())


@pytest.mark.parametrize("kind", [WholeStep, OwnLoop])
def test_checkpoints(kind, dropping):
    torch.manual_seed(0)
    middle = nn.Sequential(Residual(4), nn.Dropout(0.2), conv(4, 4))
    model = Written(checkpointed, first=conv(3, 4), middle=middle, last=head(4))
    batches = images(3)
    if kind is WholeStep:
        WholeStep(model, sgd, batches[0]).run(batches)
    else:
        OwnLoop(model, batches[0][:1]).run(batches).assert_served()


def changing(change, x, y):
    """A loop that changes something between forward and backward."""

    def loop(called, model):
        loss = F.cross_entropy(called(x), y)
        with torch.no_grad():
            change(model)
        loss.backward()
        return loss.detach()

    return loop


def change_biases(model):
    for module in model.modules():
        if not isinstance(module, nn.LayerNorm):
            for name, parameter in module.named_parameters(recurse=False):
                if "bias" in name:
                    parameter.mul_(3).add_(1)


@pytest.mark.parametrize("name", ["residual", "shared", "lstm cell"])
def test_what_eagers_backward_does_not_read_may_be_changed(name, dropping):
    torch.manual_seed(0)
    make, batches = MODELS[name][0], MODELS[name][1](3)
    pair = OwnLoop(make(), batches[0][:1])
    for x, y in batches:
        pair.zero_grad()
        pair.run_loop(changing(change_biases, x, y))
        pair.update()
    pair.compare()
    pair.assert_served()
    assert len(dropping.repeated[0]) > 2


def test_what_eagers_backward_reads_may_not_be_changed(dropping):
    torch.manual_seed(0)
    x, y = images(1)[0]
    pair = OwnLoop(MODELS["residual"][0](), (x,))
    assert dropping.repeated[0]

    def change(model):
        model[0].weight.add_(1)

    for called, model, _ in pair.sides():
        with pytest.raises((BackwardError, RuntimeError), match=r"backward|modified by an inplace"):
            changing(change, x, y)(called, model)


def looked_up(self, x):
    """Backward reads neither the table nor the long bias."""
    return self.head(self.table(x).mul(self.scale).add(self.long).tanh().mul(self.table(x)).mean(1))


def test_what_is_large_and_not_read_by_eagers_backward_is_not_read_again(dropping):
    """Repeating the look-up would need a copy of the table."""
    torch.manual_seed(0)
    width = 20_000
    table, long, scale = (nn.Parameter(torch.randn(*shape) / 9) for shape in ((11, width), (width,), (1,)))
    model = Written(looked_up, table=nn.Embedding(11, width, _weight=table), long=long, scale=scale)
    model.head = nn.Linear(width, 11)
    pair = OwnLoop(model, tokens(1)[0][:1])

    def change(model):
        model.table.weight.add_(1)
        model.long.add_(1)

    for x, y in tokens(3):
        pair.zero_grad()
        pair.run_loop(changing(change, x, y))
        pair.update()
    pair.assert_served()
    assert "aten.tanh.default" not in dropping.repeated[0]
    assert "aten.embedding.default" not in dropping.repeated[0]


def test_a_forward_in_between_updates_statistics(dropping):
    torch.manual_seed(0)
    batches = images(3)
    pair = OwnLoop(MODELS["residual"][0](), batches[0][:1])

    def loop(called, model):
        losses = [F.cross_entropy(called(x), y) for x, y in batches[:2]]
        for loss in losses:
            loss.backward()
        return [loss.detach() for loss in losses]

    for _ in range(3):
        pair.zero_grad()
        pair.run_loop(loop)
        pair.update()
    pair.compare()


def test_several_backwards(dropping):
    torch.manual_seed(0)
    batches = images(3)
    pair = OwnLoop(MODELS["residual"][0](), batches[0][:1])

    def loop(called, model, x, y):
        loss = F.cross_entropy(called(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    for x, y in batches:
        pair.zero_grad()
        pair.run_loop(partial(loop, x=x, y=y))
        pair.update()
    pair.compare()


def returns_what_backward_reads(self, x):
    x = self.first(x).sigmoid()
    return self.last(x), x


@pytest.mark.parametrize("reads", [True, False])
def test_outputs_that_the_caller_changes(reads, dropping):
    """A repetition reads an output only if eager's backward does, which then refuses."""
    torch.manual_seed(0)
    model = Written(returns_what_backward_reads, first=conv(3, 4), last=nn.Sequential(conv(4, 4), head(4)))
    if not reads:
        for parameter in model.first.parameters():
            parameter.requires_grad_(False)
        model.last = nn.Sequential(nn.BatchNorm2d(4), nn.GELU(), conv(4, 4), head(4))
    x, y = images(1)[0]
    pair = OwnLoop(model, (x,), loss_fn=lambda outputs, target: F.cross_entropy(outputs[0], target))
    refused = []
    for called, _, _ in pair.sides():
        outputs = called(x)
        loss = F.cross_entropy(outputs[0], y)
        outputs[1].detach().zero_()
        try:
            loss.backward()
            refused.append(False)
        except RuntimeError:
            refused.append(True)
    assert refused[0] == refused[1]


@pytest.mark.parametrize("kind", [WholeStep, OwnLoop])
@pytest.mark.parametrize("name", ["residual", "frozen", "skip", "transformer"])
def test_what_is_planned(name, kind):
    """The planner's own choice, within half of the step's time."""
    torch.manual_seed(0)
    make, batches = MODELS[name][0], MODELS[name][1](3)
    if kind is WholeStep:
        pair = WholeStep(make(), MOMENTUM, batches[0], recompute=0.5).run(batches)
    else:
        pair = OwnLoop(make(), batches[0][:1], recompute=0.5).run(batches)
        pair.assert_served()
    assert pair.step.plan.recomputed.operators > 0
