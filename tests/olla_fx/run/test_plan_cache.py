"""A plan is made once for each kind of call and state of the model, up to a limit."""

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
from olla_solvers.errors import OptionError
from tests.olla_fx.harness import WholeStep, assert_same, assert_same_models, assert_served, plan_count, stats
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors

MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)


def test_the_last_batch_of_an_epoch_is_smaller():
    pair = WholeStep(SmallNet(0.0), MOMENTUM, images(1, batch=4)[0])
    for _ in range(4):
        for batch in (*images(4, batch=4), *images(1, batch=3)):
            _train(pair, batch)
    pair.compare()
    assert plan_count(pair.step) == 2
    assert stats(pair.step).replans == 0
    assert_served(pair.step, 20, 1)


def _train(pair, batch):
    """One step of both; requests are counted by the caller, as every shape records a first call."""
    expected = pair.train_eager(batch)
    pair.step.poison()
    assert_same(expected, pair.step(*batch), "loss")


def test_one_buffer_serves_all_shapes():
    pair = WholeStep(SmallNet(0.0), MOMENTUM, images(1, batch=4)[0])
    sizes = {}
    for batch in (4, 2, 6, 4, 2, 6):
        for each in images(4, batch=batch):
            _train(pair, each)
        sizes[batch] = pair.step.plan.buffer_bytes
        assert pair.step._buffer._buffer.buffer_bytes == max(sizes.values())
    pair.compare()


def test_more_plans_than_the_limit():
    pair = WholeStep(SmallNet(0.0), MOMENTUM, images(1, batch=2)[0], most_plans=2)
    for batch in (2, 3, 4, 3, 2, 4):
        for each in images(4, batch=batch):
            _train(pair, each)
        assert plan_count(pair.step) <= 2
        assert_served(pair.step, 4, 1)
    pair.compare()


def test_the_plan_that_was_not_used_for_longest_goes_first(caplog):
    model = mlp()
    step = olla_fx.optimize(
        model,
        vectors(1, batch=2)[0],
        loss_fn=F.cross_entropy,
        optimizer=sgd(model.parameters()),
        most_plans=2,
        solver="none",
    )
    planned = []
    with caplog.at_level("INFO", logger="olla_fx.run.module"):
        for batch in (3, 2, 4, 2, 3):
            caplog.clear()
            step(*vectors(1, batch=batch)[0])
            planned.append(any("planning for a new kind" in each.message for each in caplog.records))
    assert planned == [True, False, True, False, True]


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
        plans.append((stats(judge).replans, plan_count(judge)))
    for one, other in zip(eager, models, strict=True):
        assert_same_models(one, other)
    assert plans[1:] == plans[:1] * 19
    for module in (maker, judge):
        assert stats(module).binding == "buffer"
        assert stats(module).counts.served > 0
        assert stats(module).counts.outside == 0


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
    assert (stats(planned).replans, plan_count(planned)) == (1, 2)
    assert (stats(planned).binding, stats(planned).counts.outside) == ("buffer", 0)
    assert stats(planned).counts.served > 0


def _train_in_states(pair, batches, change):
    """Steps of both, compared, each after ``change(model, index)``."""
    for index, batch in enumerate(batches):
        for model in (pair.eager, pair.model):
            change(model, index)
        expected = pair.train_eager(batch)
        pair.step.poison()
        assert_same(expected, pair.step(*batch), "loss")
    pair.compare()


def _freeze_every_other_time(model, index):
    model.conv.requires_grad_(index % 2 == 0)
    model.conv.zero_grad()


@pytest.mark.parametrize("make", [sgd, MOMENTUM, optim.AdamW])
def test_layers_frozen_in_every_other_step(make):
    pair = WholeStep(SmallNet(0.0), make, images(1)[0])
    _train_in_states(pair, images(20), _freeze_every_other_time)
    assert (stats(pair.step).replans, plan_count(pair.step)) == (1, 2)
    assert_served(pair.step, 20, 1)


def test_a_number_that_changes_to_and_fro():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = mlp(), 1.0

        def forward(self, x):
            return self.body(x) * self.scale

    pair = WholeStep(Scaled(), MOMENTUM, vectors(1)[0])
    _train_in_states(
        pair, vectors(20), lambda model, index: setattr(model, "scale", (1.0, 0.5, 2.0)[index % 3])
    )
    assert (stats(pair.step).replans, plan_count(pair.step)) == (2, 3)
    assert_served(pair.step, 20, 1)


def test_the_limit_counts_states_too():
    pair = WholeStep(SmallNet(0.0), MOMENTUM, images(1)[0], most_plans=1)
    _train_in_states(pair, images(4), _freeze_every_other_time)
    assert (stats(pair.step).replans, plan_count(pair.step)) == (3, 1)


def test_plans_for_tensors_that_are_gone_are_dropped():
    model = mlp()
    planned = olla_fx.optimize(model, vectors(1)[0][0], solver="none")
    model.double()
    planned(vectors(1)[0][0].double()).sum().backward()
    assert (stats(planned).replans, plan_count(planned)) == (1, 1)


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
    assert (stats(planned).replans, plan_count(planned)) == (1, 1)


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


def test_shapes_are_planned_once_each():
    pair = OwnLoop(SmallNet(), images(1, size=8)[0][0])
    for _ in range(7):
        for size, batch in ((8, 2), (10, 2), (8, 3)):
            pair.run(images(1, batch=batch, size=size))
    pair.assert_served()
    assert stats(pair.step).replans == 0
    assert plan_count(pair.step) == 3


@pytest.mark.parametrize("most_plans", [0, -1, 1.5, None, "x", True])
def test_limits_of_plans_without_a_meaning(most_plans):
    with pytest.raises(OptionError, match="most_plans"):
        olla_fx.optimize(mlp(), torch.ones(4, 6), most_plans=most_plans)
