"""Training in the caller's own loop equals eager: forward and backward are planned together."""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from tests.olla_fx.comparisons import assert_same, assert_same_gradients
from tests.olla_fx.harness import OwnLoop, assert_served
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors
from tests.olla_fx.run.own_loop.written import train_written


@pytest.mark.parametrize("make", [sgd, partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), optim.AdamW])
@pytest.mark.parametrize(("model", "batches"), [(mlp, vectors), (SmallNet, images)])
def test_twenty_steps(model, batches, make):
    pair = OwnLoop(model(), batches(1)[0][0], make).run(batches(20))
    pair.assert_served()
    assert pair.step.stats.replans == 0
    assert pair.step.stats.counts.outputs == 1


def test_the_plan_covers_both_phases():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(3))
    plan, (forward, backward) = pair.step.plan, pair.step.stats.graph_modules
    assert "convolution.default" in forward.code
    assert "convolution_backward" in backward.code
    assert "convolution_backward" not in forward.code
    assert plan.peak_bytes >= plan.lower_bound_bytes > 0
    report = pair.step.report()
    assert report.plan.baseline.live_peak_bytes > 0
    for line in ("outputs", "gradients", "dispatched, with"):
        assert line in str(report)
    assert plan.buffer_bytes >= plan.peak_bytes


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_schedule_and_gradient_clipping_of_the_callers(clip):
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    schedulers = [optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in pair.optimizers]
    for batch in images(20):
        for loss in pair.losses(batch):
            loss.backward()
        pair.change(lambda model: clip(model.parameters(), 0.02))
        pair.update()
        pair.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    pair.compare()
    pair.assert_served()


def test_gradients_accumulate():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    for index, batch in enumerate(images(21)):
        for loss in pair.losses(batch):
            (loss / 3).backward()
        pair.compare_gradients()
        if index % 3 == 2:
            pair.update()
            pair.zero_grad()
    pair.compare()
    pair.assert_served()


def test_autocast():
    pair = OwnLoop(
        SmallNet(), images(1)[0][0], context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ).run(images(20))
    assert pair.step.stats.replans == 1
    pair.assert_served()


def test_only_some_gradients():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for x, y in vectors(20):
        pair.step.poison()
        for called, model, _ in pair.sides():
            F.cross_entropy(called(x), y).backward(inputs=[model[2].weight])
        pair.compare_gradients()
    pair.assert_served()


def test_a_model_within_a_larger_one():
    """Gradients flow into the planned part's inputs and out of its outputs."""
    eager = nn.Sequential(nn.Linear(6, 6), mlp(), nn.Linear(3, 3))
    planned = copy.deepcopy(eager)
    inner = olla_fx.optimize(
        planned[1], torch.ones(4, 6, requires_grad=True), solver="none", fallback="raise"
    )
    for x, y in vectors(20):
        inner.poison()
        F.cross_entropy(eager(x), y).backward()
        F.cross_entropy(planned[2](inner(planned[0](x))), y).backward()
        assert_same_gradients(eager, planned)
    assert_served(inner)


def test_an_exception_between_forward_and_backward():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(2))

    def fail():
        loss = F.cross_entropy(pair.step(images(1)[0][0]), images(1)[0][1])
        raise KeyError(loss)

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    pair.zero_grad()
    pair.eager.load_state_dict(pair.model.state_dict())
    pair.run(images(20))
    pair.assert_served()


def test_evaluation_in_between():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    for _ in range(4):
        pair.run(images(5))
        for called, _, _ in pair.sides():
            called.eval()
        for image, _ in images(3):
            pair.step.poison()
            with torch.no_grad():
                assert_same(pair.eager(image), pair.step(image), "evaluation")
        for called, _, _ in pair.sides():
            called.train()
    pair.run(images(2))
    pair.assert_served()
    assert pair.step.stats.replans == 0


def test_frozen_statistics_and_layers():
    """Some modules in eval mode, then a layer frozen and unfrozen again."""
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(5))
    pair.change(lambda model: model.norm.eval())
    pair.run(images(5))
    for is_trained in (False, True):
        pair.change(lambda model, is_trained=is_trained: model.conv.requires_grad_(is_trained))
        pair.change(nn.Module.zero_grad)
        pair.run(images(5))
    pair.assert_served()


def test_hooks_of_parameters_run():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for model in (pair.eager, pair.model):
        model[0].weight.register_hook(lambda gradient: gradient * 2)
    pair.run(vectors(3))
    pair.assert_served()


def test_two_modules_in_turn():
    pairs = [OwnLoop(SmallNet(), images(1)[0][0]) for _ in range(2)]
    for batch in images(10):
        for pair in pairs:
            pair.train(batch)
        losses = [loss for pair in pairs for loss in pair.losses(batch)]
        for loss in losses:
            loss.backward()
        for pair in pairs:
            pair.compare_gradients()
            pair.compare()
    for pair in pairs:
        pair.assert_served()


def test_a_model_without_gradients_is_planned_for_inference():
    model = mlp().requires_grad_(False)
    step = olla_fx.optimize(model, vectors(1)[0][0], fallback="raise")
    for x, _ in vectors(3):
        step.poison()
        assert_same(model(x), step(x), "answer")
    assert_served(step)


def test_autocast_keeps_the_weights_that_it_has_cast():
    train_written(
        lambda self, x: self.first(self.first(x).relu()),
        lambda answer, _: answer.float().square().sum().backward(),
        context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    )


def test_a_number_read_from_a_tensor_crosses_the_forward_backward_boundary():
    train_written(lambda self, x: self.first(x) * x.sum().item(), lambda answer, _: answer.sum().backward())
