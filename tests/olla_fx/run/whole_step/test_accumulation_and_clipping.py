"""Gradients that accumulate over parts of a batch, and clipping, as parts of a whole step."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler

import olla_fx
from olla_fx import CaptureError, Plan
from olla_solvers.errors import OptionError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.helpers import ADAMW, MOMENTUM, SmallNet, images, mlp, sgd, vectors
from tests.olla_fx.run.whole_step.clipped import ClippedStep


@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
@pytest.mark.parametrize(
    "options",
    [
        {"parts": 3},
        {"norm": 0.05},
        {"value": 0.01},
        {"parts": 2, "norm": 0.05, "value": 0.02},
        {"parts": 6, "return_outputs": True, "outputs": 2},
        {"norm": 0.05, "scheduler": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5)},
    ],
    ids=["parts", "norm", "value", "all", "outputs", "schedule"],
)
def test_twenty_steps(make, options):
    pair = ClippedStep(SmallNet(), make, images(1, batch=6)[0], **options)
    pair.run(images(20, batch=6))
    assert pair.step.stats.replans == 0


def plan_in_parts(parts, **options):
    model = SmallNet()
    example, optimizer = images(1, batch=16, size=24)[0], ADAMW(model.parameters())
    return olla_fx.plan(
        model, example, loss_fn=F.cross_entropy, optimizer=optimizer, accumulation_steps=parts, solver="none",
        **options,
    )  # fmt: skip


def test_one_micro_batch_is_planned_for_all():
    """More micro-batches are no more operators, and their baseline is followed no further."""
    two, eight = plan_in_parts(2), plan_in_parts(8)
    assert sorted(two.order) == sorted(eight.order)
    assert two.update.order == eight.update.order
    assert two.output_bytes * 4 == eight.output_bytes
    one = plan_in_parts(1)
    model = SmallNet()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter is not model.unreached)
    assert two.static_bytes == one.static_bytes
    assert one.gradient_bytes == 0
    assert 0 < two.gradient_bytes - trained * 4 < 64 * len(list(model.parameters()))
    assert two.static_bytes == eight.static_bytes
    assert eight.baseline.requests == plan_in_parts(4).baseline.requests
    assert "micro-batches" in eight.report()
    assert Plan.from_json(eight.to_json()) == eight


def test_the_buffer_is_as_large_as_the_update_needs():
    """Adam's update needs a tensor of the parameter's size; one row's forward and backward need less."""
    model = nn.Sequential(nn.Linear(2, 64), nn.Flatten(0), nn.Unflatten(0, (-1, 64)))
    example = torch.randn(2, 2), torch.randint(64, (2,))
    step = olla_fx.optimize(
        model, example, loss_fn=F.cross_entropy, optimizer=ADAMW(model.parameters()), accumulation_steps=2,
        solver="none", fallback="raise")  # fmt: skip
    for _ in range(3):
        step(*example)
    plan = step.plan
    assert plan.buffer_bytes == max(plan.memory.buffer_bytes, plan.update.buffer_bytes)
    assert plan.peak_bytes == max(plan.memory.peak_bytes, plan.update.peak_bytes)
    micro_batch, update = step.stats.graph_modules
    assert "convolution" not in update.code
    assert "addcdiv" not in micro_batch.code
    assert step.stats.counts.outside == 0


class ManyInputs(nn.Module):
    """Tied and frozen parameters, inputs of a batch's length and others, a counter and batch statistics."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(5, 7)
        self.out.weight = self.words.weight
        self.out.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, words, scale, weights, seen):
        self.calls += 1
        seen.add_(weights.sum() * scale)
        hidden = self.drop(self.norm(self.words(words) * weights * scale))
        return {"logits": self.out(hidden), "hidden": hidden, "scale": scale, "seen": seen.amax()}


@pytest.mark.parametrize("parts", [2, 4])
def test_inputs_that_are_no_tensors_or_not_of_the_batch(parts):
    def loss_fn(outputs, target):
        return F.cross_entropy(outputs["logits"], target)

    def batches(count):
        for _ in range(count):
            words, target = torch.randint(7, (8,)), torch.randint(7, (8,))
            yield words, 0.5, torch.randn(5), torch.zeros(8, 5), target

    example = next(batches(1))
    pair = ClippedStep(
        ManyInputs(), ADAMW, example, loss_fn, parts=parts, norm=0.5, return_outputs=True, outputs=4
    )
    pair.run(batches(5))
    assert pair.step.stats.replans == 0
    assert pair.model.calls == 5 * parts


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_signs_of_zeros_and_nans_reach_the_gradients(dtype):
    """What the first micro-batch gives is the gradient, whatever it is."""

    def batches(count):
        for index in range(count):
            x = torch.randn(4, 6, dtype=dtype)
            x[:, 0] = -0.0
            if index == 2:
                x[0, 1] = float("nan")
            yield x, torch.randint(3, (4,))

    ClippedStep(mlp().to(dtype), MOMENTUM, next(batches(1)), parts=2).run(batches(4))


def test_weights_in_another_memory_layout():
    model = SmallNet().to(memory_format=torch.channels_last)
    ClippedStep(model, ADAMW, images(1, batch=4)[0], parts=2, norm=0.1).run(images(4, batch=4))


def test_other_batch_sizes_and_copies_of_the_step():
    pair = ClippedStep(SmallNet(), MOMENTUM, images(1, batch=4)[0], parts=2)
    pair.run([*images(3, batch=4), *images(3, batch=8), *images(2, batch=4)])
    assert pair.step.stats.cached_plans == 2
    twin = copy.deepcopy(pair.step)
    x, y = images(1, batch=4)[0]
    torch.manual_seed(1)
    expected = pair.step(x, y)
    torch.manual_seed(1)
    assert_same(expected, twin(x, y), "loss of a copy")
    pair.replan()
    for _ in range(2):
        pair.step(x, y)
    assert pair.step.stats.counts.outside == 0


def test_micro_batches_without_the_arena(monkeypatch):
    monkeypatch.setattr(olla_fx.arena, "available", lambda _: False)
    pair = ClippedStep(SmallNet(), ADAMW, images(1, batch=4)[0], parts=2)
    for x, y in images(3, batch=4):
        torch.manual_seed(0)
        expected = pair.train_eager((x, y))
        torch.manual_seed(0)
        assert_same(expected, pair.step(x, y), "loss")
    pair.compare()
    assert pair.step.stats.binding == "stock"


def test_parts_of_a_batch_need_less_memory():
    peaks = []
    for parts in (1, 4):
        model = SmallNet()
        plan = olla_fx.plan(
            model,
            images(1, batch=8, size=24)[0],
            loss_fn=F.cross_entropy,
            optimizer=sgd(model.parameters()),
            accumulation_steps=parts,
            solver="none",
        )
        peaks.append(plan.peak_bytes)
    assert peaks[1] < peaks[0] / 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"accumulation_steps": 3}, CaptureError, "batch of 4 cannot be cut into 3"),
        ({"accumulation_steps": 0}, OptionError, "at least 1, not 0"),
        ({"accumulation_steps": True}, OptionError, "at least 1, not True"),
        ({"clip_grad_norm": -1}, OptionError, "above 0 or None, not -1"),
        ({"clip_grad_value": "1"}, OptionError, "above 0 or None, not '1'"),
    ],
)
def test_meaningless_options_are_refused(options, error, said):
    model = mlp()
    for function in (olla_fx.optimize, olla_fx.plan):
        with pytest.raises(error, match=said):
            function(
                model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()), **options
            )


def test_the_options_belong_to_whole_steps():
    with pytest.raises(CaptureError, match="parts of a whole training step"):
        olla_fx.optimize(mlp(), vectors(1)[0][0], clip_grad_norm=1.0, fallback="raise")


@pytest.mark.parametrize("options", [{"parts": 2}, {"norm": 0.05}])
def test_gradients_that_are_one_tensor(options):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(5, 6)) for _ in range(2))
            self.c = nn.Parameter(torch.randn(()))

        def forward(self, x):
            return F.linear(x, self.a + self.b) + self.c

    ClippedStep(Shared(), MOMENTUM, vectors(1)[0], **options).run(vectors(5))


@pytest.mark.parametrize("options", [{}, {"fallback": "eager", "dynamic": False}])
def test_a_norm_over_groups_in_another_sequence_than_the_model_s(options):
    """``clip_grad_norm_(model.parameters())`` adds squares up in the model's sequence."""

    def grouped(parameters):
        parameters = list(parameters)
        groups = [[item for item in parameters if (item.dim() > 1) == decays] for decays in (True, False)]
        return optim.SGD(
            [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], lr=0.1, foreach=False
        )

    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.LayerNorm(6))])
    x, y = torch.randn(8, 6), torch.randint(6, (8,))
    pair = ClippedStep(model, grouped, (x, y), norm=0.05, **options)
    for _ in range(6):
        pair.train((torch.randn(8, 6), y))
    if options:  # of a size that comes once, which runs in eager
        pair._check_service = lambda batch: None
        pair.train((torch.randn(5, 6), y[:5]))
        pair.train((torch.randn(4, 6), y[:4]))
    pair.compare()
