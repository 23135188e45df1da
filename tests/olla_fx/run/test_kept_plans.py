"""Loops that go to and fro between two states of a model plan each of them once."""

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from tests.olla_fx.helpers import (
    SmallNet,
    Twins,
    assert_same,
    assert_same_models,
    assert_served,
    images,
    mlp,
    sgd,
    vectors,
)

MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)


def _adversarial_step(maker, judge, whole_judge, optimizers, noise, real):
    """As generators are trained: the judge is frozen while the maker learns."""
    for parameter in whole_judge.parameters():
        parameter.requires_grad_(False)
    optimizers[0].zero_grad()
    made = maker(noise)
    maker_loss = F.softplus(-judge(made)).mean()
    maker_loss.backward()
    optimizers[0].step()
    for parameter in whole_judge.parameters():
        parameter.requires_grad_(True)
    optimizers[1].zero_grad()
    judge_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
    judge_loss.backward()
    optimizers[1].step()
    return maker_loss.detach(), judge_loss.detach()


def test_a_judge_that_is_frozen_in_every_step():
    torch.manual_seed(0)
    models = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    )
    eager = copy.deepcopy(models)
    maker = olla_fx.optimize(models[0], torch.randn(5, 4), solver="none")
    judge = olla_fx.optimize(models[1], torch.randn(5, 6), solver="none")
    optimizers, eager_optimizers = ([sgd(each.parameters()) for each in pair] for pair in (models, eager))
    plans = []
    for _ in range(20):
        noise, real = torch.randn(5, 4), torch.randn(5, 6)
        for module in (maker, judge):
            module.poison()
        expected = _adversarial_step(*eager, eager[1], eager_optimizers, noise, real)
        assert_same(expected, _adversarial_step(maker, judge, models[1], optimizers, noise, real), "losses")
        plans.append((judge.replans, len(judge._plans)))
    for one, other in zip(eager, models, strict=True):
        assert_same_models(one, other)
    assert plans[1:] == plans[:1] * 19
    for module in (maker, judge):
        assert module.binding == "buffer"
        assert module.counts.served > 0
        assert module.counts.outside == 0


def test_autocast_in_every_other_step():
    torch.manual_seed(0)
    model = SmallNet(0.0)
    eager = copy.deepcopy(model)
    planned = olla_fx.optimize(model, images(1)[0][0], solver="none")
    optimizers = [sgd(each.parameters()) for each in (eager, model)]
    for index, (x, y) in enumerate(images(20)):
        planned.poison()
        losses = []
        for module, optimizer in zip((eager, planned), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16) if index % 2 else nullcontext():
                losses.append(F.cross_entropy(module(x), y))
            losses[-1].backward()
            optimizer.step()
        assert_same(*losses, "loss")
    assert_same_models(eager, model)
    assert (planned.replans, len(planned._plans)) == (1, 2)
    assert (planned.binding, planned.counts.outside) == ("buffer", 0)
    assert planned.counts.served > 0


def _train_in_states(twins, batches, change):
    """Steps of both, compared, each after ``change(model, index)``."""
    for index, batch in enumerate(batches):
        for model in (twins.eager, twins.planned):
            change(model, index)
        expected = twins.train_eager(batch)
        twins.step.poison()
        assert_same(expected, twins.step(*batch), "loss")
    twins.compare()


def _freeze_every_other_time(model, index):
    model.conv.requires_grad_(index % 2 == 0)
    model.conv.zero_grad()


@pytest.mark.parametrize("make", [sgd, MOMENTUM, optim.AdamW])
def test_layers_frozen_in_every_other_step(make):
    twins = Twins(SmallNet(0.0), make, images(1)[0])
    _train_in_states(twins, images(20), _freeze_every_other_time)
    assert (twins.step.replans, len(twins.step._plans)) == (1, 2)
    assert_served(twins.step, 20, 1)


def test_a_number_that_changes_to_and_fro():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = mlp(), 1.0

        def forward(self, x):
            return self.body(x) * self.scale

    twins = Twins(Scaled(), MOMENTUM, vectors(1)[0])
    _train_in_states(
        twins, vectors(20), lambda model, index: setattr(model, "scale", (1.0, 0.5, 2.0)[index % 3])
    )
    assert (twins.step.replans, len(twins.step._plans)) == (2, 3)
    assert_served(twins.step, 20, 1)


def test_the_limit_counts_states_too():
    twins = Twins(SmallNet(0.0), MOMENTUM, images(1)[0], most_plans=1)
    _train_in_states(twins, images(4), _freeze_every_other_time)
    assert (twins.step.replans, len(twins.step._plans)) == (3, 1)


def test_plans_for_tensors_that_are_gone_are_dropped():
    model = mlp()
    planned = olla_fx.optimize(model, vectors(1)[0][0], solver="none")
    model.double()
    planned(vectors(1)[0][0].double()).sum().backward()
    assert (planned.replans, len(planned._plans)) == (1, 1)


@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_a_replaced_module_is_not_kept_by_its_plan(mode):
    model, (x, y) = mlp(), vectors(1)[0]
    if mode == "training":
        optimizer = MOMENTUM(model.parameters())
        planned = olla_fx.optimize(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
        batch = x, y
    else:
        planned, batch = olla_fx.optimize(model.train(mode == "own loop"), x, solver="none"), (x,)
    planned(*batch)
    layer = model[0]
    gone = [weakref.ref(layer), weakref.ref(layer.weight)]
    model[0] = copy.deepcopy(layer)
    if mode == "training":
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = list(model.parameters())
    del layer
    planned(*batch)
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert (planned.replans, len(planned._plans)) == (1, 1)
