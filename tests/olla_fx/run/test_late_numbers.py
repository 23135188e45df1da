"""Python numbers that a loop changes become inputs of the graph, unless their values decide more than results."""

import copy
import logging
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import ADAMW, mlp, sgd, vectors

VECTORS = vectors(8)


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
    "make", [_module, _object, _method, _closure, _global, _dictionary, _namespace], ids=lambda make: make.__name__
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


class Scaled(nn.Module):
    """A network that uses numbers of its own; what it does with them is given."""

    def __init__(self, use, **numbers):
        super().__init__()
        self.net, self.use = mlp(), use
        for name, number in numbers.items():
            setattr(self, name, number)

    def forward(self, x):
        return self.use(self, self.net(x))


def train(module, change, *, own_loop=True, steps=8, options=None):
    """Train with a change after every step; return the pair."""
    if own_loop:
        pair = OwnLoop(module, VECTORS[0][:1], **(options or {}))
    else:
        pair = WholeStep(module, sgd, VECTORS[0], **(options or {}))
    for index, batch in enumerate(VECTORS[:steps]):
        pair.train(batch)
        pair.change(lambda model, index=index: change(model, index))
    pair.compare()
    assert_served_or_new(pair)
    return pair


def assert_served_or_new(pair):
    assert pair.step.stats.binding == "buffer"
    assert pair.step.stats.counts.served > 0


def anneal(model, index):
    model.beta = model.beta * 0.9


def count(model, index):
    model.beta += 1


LATE = {
    "temperature": (lambda m, y: y / m.beta, 2.0, anneal),
    "reciprocal": (lambda m, y: y * (1.0 / (m.beta - 0.5)), 3.0, anneal),
    "counter": (lambda m, y: y * m.beta + m.beta, 3, count),
    "warm-up": (lambda m, y: y * min(1.0, m.beta / 1000), 3, count),
    "cosine of a tensor": (lambda m, y: y * torch.cos(y * m.beta), 3.0, anneal),
    "clamp": (lambda m, y: y.clamp(-m.beta, m.beta), 0.7, anneal),
    "slope": (lambda m, y: F.leaky_relu(y, m.beta), 0.3, anneal),
    "alpha": (lambda m, y: torch.add(y, y.exp(), alpha=m.beta), 0.3, anneal),
    "mixed in place": (lambda m, y: y.clone().mul_(m.beta).add_(1 - m.beta), 0.3, anneal),
    "filled": (lambda m, y: y + torch.full_like(y, m.beta), 0.3, anneal),
    "integers": (lambda m, y: y * (m.beta // 2 + m.beta % 3), 3, count),
    "power": (lambda m, y: y * m.beta**2, 3.0, anneal),
    "zero": (lambda m, y: y * (m.beta * 0) + y * (m.beta - m.beta), -3.0, anneal),
    "dropped": (lambda m, y: F.dropout(y, 0.5) * m.beta, 0.3, anneal),
}


@pytest.mark.parametrize("name", LATE)
def test_a_number_that_is_only_calculated_with_is_bound_late(name):
    use, start, change = LATE[name]
    for own_loop in (True, False):
        pair = train(Scaled(use, beta=start), change, own_loop=own_loop)
        assert pair.step.stats.replans == 1


def _checks_type(m, y):
    return y * m.beta if isinstance(m.beta, float) else y + m.beta


def _reads_behind(m, y):
    return y * m.beta + y * vars(m)["beta"] + y * m.__dict__["beta"]


def _formats(m, y):
    assert f"{m.beta:.2f}"
    return y * m.beta


def _looks_up(m, y):
    return y * {0.5: 1.0}.get(m.beta, 2.0)


CONSTANT = {
    "isinstance": (_checks_type, 0.5, anneal),
    "format": (_formats, 0.5, anneal),
    "text": (lambda m, y: y * len(str(m.beta)), 0.5, anneal),
    "key": (_looks_up, 0.5, anneal),
    "math": (lambda m, y: y * math.exp(m.beta), 0.5, anneal),
    "float": (lambda m, y: y * float(m.beta), 0.5, anneal),
    "floor": (lambda m, y: y * (m.beta // 0.1), 1.0, anneal),
    "tensor": (lambda m, y: y * torch.tensor(m.beta), 0.5, anneal),
    "shape": (lambda m, y: torch.cat([y, y.new_zeros(len(y), m.beta)], 1), 1, count),
    "slice": (lambda m, y: y + y[:, : m.beta].sum(), 1, count),
    "loop": (lambda m, y: sum(y * index for index in range(m.beta)), 2, count),
    "dropout": (lambda m, y: F.dropout(y, m.beta), 0.5, anneal),
    "tensor power": (lambda m, y: y.exp() ** m.beta, 0.5, anneal),
    "lerp": (lambda m, y: torch.lerp(y, y.exp(), m.beta), 0.5, anneal),
    "numpy": (lambda m, y: y * float(torch.as_tensor(m.beta).numpy()), 0.5, anneal),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_a_number_whose_value_decides_more_stays_a_constant(name, caplog):
    use, start, change = CONSTANT[name]
    with caplog.at_level(logging.INFO, "olla_fx"):
        pair = train(Scaled(use, beta=start), change, own_loop=False, steps=3)
    assert pair.step.stats.replans == 2
    assert sum("stay constants" in line for line in caplog.messages) == 1, "tried once"
    assert type(pair.model.beta) is type(start)


def test_a_number_read_in_two_ways_stays_a_constant():
    pair = train(Scaled(_reads_behind, beta=0.5), anneal, steps=3)
    assert pair.step.stats.replans == 2


def test_a_decision_by_a_number_is_taken_again_at_every_call():
    def use(m, y):
        return y * m.beta if m.beta > 0.45 else y.exp() * m.beta

    def change(model, index):
        model.beta = [0.9, 0.8, 0.3, 0.2, 0.1, 0.7, 0.4, 0.45][index]

    pair = train(Scaled(use, beta=1.0), change)
    assert pair.step.stats.replans == 3  # late above; a constant below, then late there


def test_a_decision_at_0():
    def change(model, index):
        model.beta = [0.5, 0.25, 0.0, 0.1, -0.0, 0.3, 0.0, 0.0][index]

    pair = train(Scaled(lambda m, y: y + y.exp() * m.beta if m.beta else y, beta=1.0), change)
    assert pair.step.stats.replans == 3  # late; 0.0 and -0.0 as constants


def test_several_numbers_at_once_and_one_after_the_other():
    def use(m, y):
        return y * m.beta + y.exp() * m.gamma + m.step

    def change(model, index):
        model.beta *= 0.9
        model.step += index > 2
        model.gamma *= 0.5 if index > 4 else 1.0

    pair = train(Scaled(use, beta=1.0, gamma=2.0, step=1), change)
    assert pair.step.stats.replans == 3


def test_a_number_that_changes_its_type():
    def change(model, index):
        model.beta = [1, 2, 3, 0.5, 0.25, 4, True, 2][index]

    pair = train(Scaled(lambda m, y: y * m.beta, beta=0), change)
    assert pair.step.stats.replans == 4  # int, late; 0.5, late; True


def test_infinite_numbers_are_constants():
    def change(model, index):
        model.beta = [0.5, 0.25, float("inf"), 0.1, float("nan"), 0.3, 2.0, 0.0][index]

    pair = train(Scaled(lambda m, y: y.clamp(max=m.beta) + y * (m.beta - m.beta), beta=1.0), change)
    assert pair.step.stats.replans == 3


def test_a_drop_path_rate():
    """Its random mask is drawn by a kernel that wants the rate as a constant."""

    def use(m, y):
        keep = 1 - m.beta
        return y * y.new_empty(len(y), 1).bernoulli_(keep) / keep

    pair = train(Scaled(use, beta=0.5), anneal, own_loop=False, steps=4)
    assert pair.step.stats.replans == 3


