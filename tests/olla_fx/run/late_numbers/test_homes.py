"""The weight of a loss is bound late wherever it is kept: in a module, an object, a closure, a dictionary."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.harness import WholeStep, assert_served
from tests.olla_fx.helpers import ADAMW
from tests.olla_fx.run.late_numbers.scaled import VECTORS


class VAE(nn.Module):
    """Returns the reconstruction, and mean and logarithm of the variance of the code."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def elbo(outputs, x, weight):
    reconstruction, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return F.mse_loss(reconstruction, x) + weight * divergence


class ModuleLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = 0.1

    def forward(self, outputs, x):
        return elbo(outputs, x, self.weight)

    def set(self, weight):
        self.weight = weight


class ObjectLoss:
    def __init__(self):
        self.weight = 0.1

    def __call__(self, outputs, x):
        return elbo(outputs, x, self.weight)

    def compute(self, outputs, x):
        return elbo(outputs, x, self.weight)


WEIGHT = 0.1


def _global():
    def set_weight(value):
        globals()["WEIGHT"] = value

    return lambda outputs, x: elbo(outputs, x, WEIGHT), set_weight


def _closure():
    weight = 0.1

    def set_weight(value):
        nonlocal weight
        weight = value

    return lambda outputs, x: elbo(outputs, x, weight), set_weight


def _dictionary():
    settings = {"loss": {"weight": 0.1, "other": 1}, "names": ["a"]}
    return lambda outputs, x: elbo(outputs, x, settings["loss"]["weight"]), (
        lambda value: settings["loss"].update(weight=value)
    )


def _namespace():
    settings = SimpleNamespace(weight=0.1, name="vae", rates=(1, 2))
    return lambda outputs, x: elbo(outputs, x, settings.weight), (
        lambda value: setattr(settings, "weight", value)
    )


def _module():
    loss = ModuleLoss()
    return loss, lambda value: setattr(loss, "weight", value)


def _object():
    loss = ObjectLoss()
    return loss, lambda value: setattr(loss, "weight", value)


def _method():
    loss = ObjectLoss()
    return loss.compute, lambda value: setattr(loss, "weight", value)


@pytest.fixture
def weight():
    yield
    globals()["WEIGHT"] = 0.1


@pytest.mark.usefixtures("weight")
@pytest.mark.parametrize(
    "make",
    [_module, _object, _method, _closure, _global, _dictionary, _namespace],
)
def test_an_annealed_vae_is_planned_twice(make):
    loss, set_weight = make()
    batches = [(x, x) for x, _ in VECTORS]
    pair = WholeStep(VAE(), ADAMW, batches[0], loss)
    for index, batch in enumerate(batches):
        set_weight(0.1 + 0.05 * index)
        pair.train(batch)
    pair.compare()
    assert_served(pair.step)
    assert pair.step.stats.replans == 1
    assert pair.step.stats.cached_plans == 2
