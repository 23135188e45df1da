"""Steps in which arrays are dropped and made again: the same bits, whatever is dropped."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.errors import BackwardError
from tests.olla_fx.harness import CompiledLoop, OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import ADAMW, MOMENTUM, Written, images, sgd
from tests.olla_fx.recomputation.dropping import Dropping
from tests.olla_fx.recomputation.models import MODELS, Residual, conv, head, tokens
from tests.olla_fx.run.whole_step.clipped import ClippedStep


@pytest.fixture
def dropping(monkeypatch):
    return Dropping(monkeypatch)


QUICK = ("residual", "activations", "transformer", "lstm cell")
"""Models whose every way of running is part of the usual tests."""

NUMBERED = [
    pytest.param(number, name, marks=() if name in QUICK else pytest.mark.slow)
    for number, name in enumerate(MODELS)
]

OPTIMIZERS = (sgd, MOMENTUM, ADAMW)


@pytest.mark.parametrize(("number", "name"), NUMBERED)
def test_whole_steps(number, name, dropping):
    torch.manual_seed(0)
    make, batches = MODELS[name][0], MODELS[name][1](3)
    WholeStep(make(), OPTIMIZERS[number % 3], batches[0]).run(batches)
    assert len(dropping.repeated[0]) > 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_random_drops(name, seed, dropping):
    torch.manual_seed(seed)
    dropping(share=0.6 - 0.2 * seed, again=0.3, seed=seed)
    make, batches = MODELS[name][0], MODELS[name][1](2)
    WholeStep(make(), MOMENTUM, batches[0], rewrites="all" if seed else "none").run(batches)


@pytest.mark.parametrize(("number", "name"), NUMBERED)
def test_clipping_by_norm(number, name, dropping):
    """Gradients are made once for the norm, and once more for the update."""
    torch.manual_seed(0)
    dropping(share=1 - 0.1 * number, again=0.1 * number, seed=number)
    make, batches = MODELS[name][0], MODELS[name][1](3)
    ClippedStep(make(), OPTIMIZERS[number % 3], batches[0], norm=0.1).run(batches)
    assert any("backward" in target or ".mm." in target for target in dropping.repeated[0])


@pytest.mark.parametrize(("number", "name"), NUMBERED)
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
        pair = WholeStep(MODELS[name][0](), sgd, batches[0]).run(
            [batch for batch in batches for _ in range(2)]
        )
        assert pair.step.stats.families == 1
    assert all(len(repeated) > 4 for repeated in dropping.repeated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype, dropping):
    torch.manual_seed(0)
    batches = [(x.to(dtype), y) for x, y in images(2)]
    WholeStep(MODELS["residual"][0]().to(dtype), sgd, batches[0]).run(batches)
    repeated = set(dropping.repeated[0])
    wide = {"olla_fx.dropout_mask_drawn_again.default", "olla_fx.dropout_backward.default"}
    again = wide if dtype is torch.float64 else {"olla_fx.bernoulli_drawn_again.p"}
    assert again <= repeated


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
@pytest.mark.parametrize("name", ["frozen", "skip"])
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
