"""A plan is made once for each kind of call and state of the model, up to a limit."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_solvers.errors import OptionError
from tests.olla_fx.comparisons import assert_same, assert_same_models
from tests.olla_fx.harness import (
    OwnLoop,
    WholeStep,
    assert_served,
    assert_served_if_settled,
)
from tests.olla_fx.helpers import MOMENTUM, SmallNet, images, mlp, sgd, vectors


def test_the_last_batch_of_an_epoch_is_smaller():
    pair = WholeStep(SmallNet(0.0), MOMENTUM, images(1, batch=4)[0])
    for _ in range(4):
        for batch in (*images(4, batch=4), *images(1, batch=3)):
            pair.train(batch)
    pair.compare()
    assert pair.step.stats.cached_plans == 2
    assert pair.step.stats.replans == 0
    assert_served(pair.step, 1)


def test_more_plans_than_the_limit():
    pair = WholeStep(SmallNet(0.0), MOMENTUM, images(1, batch=2)[0], cache_size_limit=2, dynamic=False)
    for size in (2, 3, 4, 3, 2, 4):
        pair.run(images(4, batch=size))
        assert pair.step.stats.cached_plans <= 2
        assert_served(pair.step, 1)


def test_the_plan_that_was_not_used_for_longest_goes_first():
    model = mlp()
    step = olla_fx.optimize(
        model,
        vectors(1, batch=2)[0],
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        cache_size_limit=2,
        dynamic=False,
        solver="none",
        fallback="raise",
    )
    had_a_plan = []
    for size in (2, 3, 2, 4, 2, 3):
        step(*vectors(1, batch=size)[0])
        had_a_plan.append(assert_served_if_settled(step))
    assert had_a_plan == [False, False, True, False, True, False]


def _adversarial_step(generator, discriminator, model, optimizers, noise, real):
    """Train a generator with its discriminator frozen, then the discriminator, whose model is ``model``."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimizers[0].zero_grad()
    made = generator(noise)
    generator_loss = F.softplus(-discriminator(made)).mean()
    generator_loss.backward()
    optimizers[0].step()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimizers[1].zero_grad()
    discriminator_loss = (
        F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(made.detach())).mean()
    )
    discriminator_loss.backward()
    optimizers[1].step()
    return generator_loss.detach(), discriminator_loss.detach()


def test_a_discriminator_that_is_frozen_in_every_step():
    models = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    )
    eager = copy.deepcopy(models)
    generator = olla_fx.optimize(models[0], torch.randn(5, 4), solver="none", fallback="raise")
    discriminator = olla_fx.optimize(models[1], torch.randn(5, 6), solver="none", fallback="raise")
    optimizers, eager_optimizers = ([sgd(model.parameters()) for model in pair] for pair in (models, eager))
    plans = []
    for _ in range(20):
        noise, real = torch.randn(5, 4), torch.randn(5, 6)
        for module in (generator, discriminator):
            module.poison()
        expected = _adversarial_step(*eager, eager[1], eager_optimizers, noise, real)
        assert_same(
            expected,
            _adversarial_step(generator, discriminator, models[1], optimizers, noise, real),
            "losses",
        )
        plans.append((discriminator.stats.replans, discriminator.stats.cached_plans))
    for pair in zip(eager, models, strict=True):
        assert_same_models(*pair)
    assert plans[1:] == plans[:1] * 19
    for module in (generator, discriminator):
        assert_served(module)


def test_autocast_in_every_other_step():
    pair = OwnLoop(SmallNet(0.0), images(1)[0][0])
    pair.context = lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=pair.calls % 2 == 1)
    pair.run(images(20))
    assert (pair.step.stats.replans, pair.step.stats.cached_plans) == (1, 2)
    pair.assert_served()


def _train_changing(pair, batches, change):
    """Train on some batches, each after ``change(model, index)``."""
    for index, batch in enumerate(batches):
        pair.change(lambda model, index=index: change(model, index))
        pair.train(batch)
    pair.compare()


def _freeze_every_other_time(model, index):
    model.conv.requires_grad_(index % 2 == 0)
    model.conv.zero_grad()


@pytest.mark.parametrize("make", [sgd, MOMENTUM, optim.AdamW])
def test_layers_frozen_in_every_other_step(make):
    pair = WholeStep(SmallNet(0.0), make, images(1)[0])
    _train_changing(pair, images(20), _freeze_every_other_time)
    assert (pair.step.stats.replans, pair.step.stats.cached_plans) == (1, 2)
    assert_served(pair.step, 1)


def test_a_number_that_changes_to_and_fro():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = mlp(), 1.0

        def forward(self, x):
            return self.body(x) * float(self.scale)  # which no symbolic number survives

    pair = WholeStep(Scaled(), MOMENTUM, vectors(1)[0])
    _train_changing(
        pair, vectors(20), lambda model, index: setattr(model, "scale", (1.0, 0.5, 2.0)[index % 3])
    )
    assert (pair.step.stats.replans, pair.step.stats.cached_plans) == (2, 3)
    assert_served(pair.step, 1)


def test_the_limit_counts_states_too():
    pair = WholeStep(SmallNet(0.0), MOMENTUM, images(1)[0], cache_size_limit=1)
    _train_changing(pair, images(4), _freeze_every_other_time)
    assert (pair.step.stats.replans, pair.step.stats.cached_plans) == (3, 1)


def test_plans_for_tensors_that_are_gone_are_dropped():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    pair.change(nn.Module.double)
    x, y = vectors(1)[0]
    pair.train((x.double(), y))
    assert (pair.step.stats.replans, pair.step.stats.cached_plans) == (1, 1)


@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_a_replaced_module_is_not_kept_by_its_plan(mode):
    model, (x, y) = mlp(), vectors(1)[0]
    if mode == "training":
        optimizer = MOMENTUM(model.parameters())
        step = olla_fx.optimize(
            model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, solver="none", fallback="raise"
        )
        batch = x, y
    else:
        step, batch = (
            olla_fx.optimize(model.train(mode == "own loop"), x, solver="none", fallback="raise"),
            (x,),
        )
    step(*batch)
    layer = model[0]
    references = [weakref.ref(layer), weakref.ref(layer.weight)]
    model[0] = copy.deepcopy(layer)
    if mode == "training":
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = list(model.parameters())
    del layer
    step(*batch)
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert (step.stats.replans, step.stats.cached_plans) == (1, 1)


def test_shapes_are_planned_once_each():
    pair = OwnLoop(SmallNet(), images(1, size=8)[0][0], dynamic=False)
    for _ in range(7):
        for size, batch_size in ((8, 2), (10, 2), (8, 3)):
            pair.run(images(1, batch=batch_size, size=size))
    pair.assert_served()
    assert pair.step.stats.replans == 0
    assert pair.step.stats.cached_plans == 3


@pytest.mark.parametrize("cache_size_limit", [0, -1, 1.5, None, "x", True])
def test_meaningless_limits_are_refused(cache_size_limit):
    with pytest.raises(OptionError, match="cache_size_limit"):
        olla_fx.optimize(mlp(), torch.ones(4, 6), cache_size_limit=cache_size_limit, fallback="raise")
