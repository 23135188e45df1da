"""Results over arguments that others read, too: chosen with the order, with the same bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import compile as pipeline
from tests.olla_fx.harness import OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import Written, pairs, sgd, vectors

FORMULAS = {
    "gate": lambda h: torch.tanh(h) * torch.sigmoid(h),
    "wave": lambda h: torch.sin(h) * torch.cos(h),
    "snake": lambda h: h * torch.exp(-h * h) + torch.sin(h),
    "mish": lambda h: h * torch.tanh(F.softplus(h)),
    "polynomial": lambda h: h + h**2 / 2 + h**3 / 6,
}


def between(formula):
    """Two layers with a formula of one element each between them, which has the largest arrays."""
    return Written(
        lambda self, x: self.last(formula(self.first(x))), first=nn.Linear(6, 300), last=nn.Linear(300, 3)
    )


@pytest.fixture
def without_sharing(monkeypatch):
    """Return a function that plans as if nothing could be chosen."""

    def plan(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "choose_sharing", lambda rewriting, candidate: candidate)
            return olla_fx.plan(*arguments, recompute=0, **options)

    return plan


def huber(output, target):
    """The loss of Huber as it is written by hand."""
    error = output - target
    size = error.abs()
    return torch.where(size < 1, 0.5 * error * error, size - 0.5).mean()


@pytest.mark.parametrize("name", ["gate", "wave", "snake", "polynomial"])
def test_inference_needs_less(name, without_sharing):
    model, (x, _) = between(FORMULAS[name]).eval(), vectors(1, batch=64)[0]
    step = check_inference(model, [batch[:1] for batch in vectors(4, batch=64)], 1)
    plain = without_sharing(model, x)
    assert olla_fx.plan(model, x).peak_bytes < 0.75 * plain.peak_bytes
    assert step.plan.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("name", ["gate", "snake", "mish"])
def test_whole_steps_need_less(name, without_sharing):
    model, batches = between(FORMULAS[name]), vectors(4, batch=64)
    options = {"loss_fn": F.cross_entropy, "optimizer": sgd(model.parameters())}
    plain = without_sharing(model, batches[0], **options)
    shared = olla_fx.plan(model, batches[0], recompute=0, **options)
    assert shared.peak_bytes < 0.9 * plain.peak_bytes
    assert shared.peak_bytes == shared.lower_bound_bytes
    WholeStep(model, sgd, batches[0], recompute=0).run(batches)


@pytest.mark.parametrize("name", FORMULAS)
def test_loops_of_ones_own_are_as_in_eager(name):
    batches = vectors(4, batch=64)
    OwnLoop(between(FORMULAS[name]), batches[0][0]).run(batches).assert_served()


@pytest.mark.parametrize("name", ["gate", "snake"])
def test_all_sizes_are_as_in_eager(name):
    batches = [vectors(1, batch=batch)[0][:1] for batch in (64, 48, 48, 80, 80, 64, 96)]
    check_inference(between(FORMULAS[name]), batches, 1)


def test_a_loss_written_by_hand_needs_less(without_sharing):
    model, batches = nn.Linear(6, 400), pairs((64, 6), (64, 400), count=4)
    options = {"loss_fn": huber, "optimizer": sgd(model.parameters())}
    plain = without_sharing(model, batches[0], **options)
    assert olla_fx.plan(model, batches[0], recompute=0, **options).peak_bytes < plain.peak_bytes
    WholeStep(model, sgd, batches[0], huber, recompute=0).run(batches)
