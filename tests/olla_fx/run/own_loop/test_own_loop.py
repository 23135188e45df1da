"""Training in the caller's own loop equals eager: forward and backward are planned together."""

import copy
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from tests.olla_fx.harness import assert_same, assert_same_models, is_busy, phases, stats
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors


class OwnLoop:
    """One model twice, from the same weights: in an eager loop, and in the same loop around a planned one."""

    def __init__(self, model, example, make=sgd, loss_fn=F.cross_entropy, context=nullcontext):
        self.eager, self.model = copy.deepcopy(model), model
        self.optimizers = [make(each.parameters()) for each in (self.eager, model)]
        self.loss_fn, self.context = loss_fn, context
        self.planned = olla_fx.optimize(model, example, solver="none")
        self.calls = 0

    def losses(self, *batch):
        """Forward and loss of both, from the same random numbers."""
        *inputs, target = batch
        if not self.planned.is_busy:
            self.planned.poison()
        losses = []
        for module in (self.eager, self.planned):
            torch.manual_seed(self.calls)
            with self.context():
                losses.append(self.loss_fn(module(*inputs), target))
        self.calls += 1
        assert_same(losses[0].detach(), losses[1].detach(), "loss")
        return losses

    def compare_gradients(self):
        for (name, one), other in zip(self.eager.named_parameters(), self.model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                assert_same(one.grad, other.grad, f"gradient of {name}")

    def step(self, *batch):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        assert not self.planned.is_busy
        for loss in self.losses(*batch):
            loss.backward()
        self.compare_gradients()
        for optimizer in self.optimizers:
            optimizer.step()

    def run(self, batches):
        for batch in batches:
            self.step(*batch)
        assert_same_models(self.eager, self.model)
        return self

    def assert_served(self):
        assert self.planned.binding == "buffer"
        assert not self.planned.is_busy
        assert self.planned.counts.served > 0
        assert self.planned.counts.outside == 0, self.planned.outside_log
        assert self.planned.stock_runs == 0


@pytest.mark.parametrize("make", [sgd, partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), optim.AdamW])
@pytest.mark.parametrize(("model", "batches"), [(mlp, vectors), (SmallNet, images)])
def test_twenty_steps(model, batches, make):
    pair = OwnLoop(model(), batches(1)[0][0], make).run(batches(20))
    pair.assert_served()
    assert stats(pair.step).replans == 0
    gradients = sum(each.grad is not None for each in pair.model.parameters())
    assert stats(pair.step).counts.outputs == 1 + gradients


def test_the_plan_covers_both_phases():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(3))
    plan, (forward, backward) = pair.step.plan, phases(pair.step)
    assert "convolution.default" in forward.code
    assert "convolution_backward" in backward.code
    assert "convolution_backward" not in forward.code
    assert plan.peak_bytes >= plan.lower_bound_bytes > 0
    report = pair.step.report()
    assert report.plan.baseline.live_peak_bytes > 0
    for line in ("outputs, outside the buffer", "eager live peak (dispatched)"):
        assert line in str(report)
    assert plan.buffer_bytes >= plan.peak_bytes


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_schedule_and_gradient_clipping_of_the_callers(clip):
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.8) for each in pair.optimizers]
    for batch in images(20):
        for loss in pair.losses(batch):
            loss.backward()
        for model, optimizer, scheduler in zip(
            (pair.eager, pair.model), pair.optimizers, schedulers, strict=True
        ):
            clip(model.parameters(), 0.02)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert_same_models(pair.eager, pair.model)
    pair.assert_served()


def test_gradients_accumulate():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    for index, batch in enumerate(images(21)):
        for loss in pair.losses(batch):
            (loss / 3).backward()
        pair.compare_gradients()
        if index % 3 == 2:
            for optimizer in pair.optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_models(pair.eager, pair.model)
    pair.assert_served()


def test_autocast():
    pair = OwnLoop(
        SmallNet(), images(1)[0][0], context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ).run(images(20))
    assert stats(pair.step).replans == 1
    pair.assert_served()


def test_only_some_gradients():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for x, y in vectors(20):
        pair.step.poison()
        for module, model in ((pair.eager, pair.eager), (pair.step, pair.model)):
            F.cross_entropy(module(x), y).backward(inputs=[model[2].weight])
        pair.compare_gradients()
    pair.assert_served()


def test_a_model_within_a_larger_one():
    """Gradients flow into the planned part's inputs and out of its outputs."""
    eager = nn.Sequential(nn.Linear(6, 6), mlp(), nn.Linear(3, 3))
    planned = copy.deepcopy(eager)
    inner = olla_fx.optimize(planned[1], torch.ones(4, 6, requires_grad=True), solver="none")
    for x, y in vectors(20):
        inner.poison()
        F.cross_entropy(eager(x), y).backward()
        F.cross_entropy(planned[2](inner(planned[0](x))), y).backward()
        for one, other in zip(eager.parameters(), planned.parameters(), strict=True):
            assert_same(one.grad, other.grad, "gradient")
    assert stats(inner).binding == "buffer"
    assert stats(inner).counts.served > 0
    assert stats(inner).counts.outside == 0


def test_an_exception_between_forward_and_backward():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(2))

    def fail():
        loss = F.cross_entropy(pair.step(images(1)[0][0]), images(1)[0][1])
        raise KeyError(loss)

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.eager.load_state_dict(pair.model.state_dict())
    pair.run(images(20))
    pair.assert_served()


def test_evaluation_in_between():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    for _ in range(4):
        pair.run(images(5))
        for module in (pair.eager, pair.step):
            module.eval()
        for image, _ in images(3):
            pair.step.poison()
            with torch.no_grad():
                assert_same(pair.eager(image), pair.step(image), "evaluation")
        for module in (pair.eager, pair.step):
            module.train()
    pair.run(images(2))
    pair.assert_served()
    assert stats(pair.step).replans == 0


def test_frozen_statistics_and_layers():
    """Some modules in eval mode, then a layer frozen and unfrozen again."""
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(5))
    for model in (pair.eager, pair.model):
        model.norm.eval()
    pair.run(images(5))
    for wanted in (False, True):
        for model in (pair.eager, pair.model):
            model.conv.requires_grad_(wanted)
            model.zero_grad()
        pair.run(images(5))
    pair.assert_served()


def test_hooks_of_parameters_run():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for model in (pair.eager, pair.model):
        model[0].weight.register_hook(lambda gradient: gradient * 2)
    pair.run(vectors(3))
    pair.assert_served()


def test_two_modules_in_turn():
    pair = [OwnLoop(SmallNet(), images(1)[0][0]) for _ in range(2)]
    for batch in images(10):
        for one in pair:
            one.step(*batch)
        losses = [one.losses(*batch) for one in pair]
        for pair in losses:
            for loss in pair:
                loss.backward()
        for one in pair:
            one.compare_gradients()
            assert_same_models(one.eager, one.model)
    for one in pair:
        one.assert_served()


def test_a_model_without_gradients_is_planned_for_inference():
    model = mlp().requires_grad_(False)
    planned = olla_fx.optimize(model, vectors(1)[0][0])
    for x, _ in vectors(3):
        assert_same(model(x), planned(x), "answer")
    assert stats(planned).counts.served > 0


class Written(nn.Module):
    """A model given by a function of its modules and inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        self.l, self.k = nn.Linear(6, 6), nn.Linear(6, 6)
        for name, part in parts.items():
            if (
                isinstance(part, torch.Tensor)
                and not isinstance(part, nn.Parameter)
                and not part.requires_grad
            ):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def both(function, use, steps=3, context=nullcontext, **parts):
    """Use a model and its planned twin in the same way; compare all gradients."""
    torch.manual_seed(0)
    model = Written(function, **parts)
    pair = OwnLoop(model, torch.randn(4, 6))
    for step in range(steps):
        x = torch.randn(4, 6)
        for module, own in ((pair.eager, pair.eager), (pair.step, pair.model)):
            torch.manual_seed(step)
            with context():
                answer = module(x)
            use(answer, own)
        pair.compare_gradients()
    assert not is_busy(pair.step)
    return pair


def test_autocast_keeps_the_weights_that_it_has_cast():
    both(
        lambda self, x: self.l(self.l(x).relu()),
        lambda answer, _: answer.float().square().sum().backward(),
        context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )


def test_a_number_read_from_a_tensor_crosses_the_hand_over():
    both(lambda self, x: self.l(x) * x.sum().item(), lambda answer, _: answer.sum().backward())
