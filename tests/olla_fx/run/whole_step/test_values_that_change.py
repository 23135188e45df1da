"""Python values that a plan depends on are compared exactly."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import mlp, sgd, vectors


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Picky(nn.Module):
    """Reads Python values that look alike, or are hard to look into."""

    shared = 2.0

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.zero = 0.0
        self.zeros = (0.0, 1)
        self.recent = collections.deque([1.0], maxlen=3)
        self.slotted = Slotted(3.0)

    def forward(self, x):
        x = torch.copysign(x, torch.full_like(x, self.zero)) * self.zeros[1]
        x = x * torch.full_like(x, self.zeros[0]).sign().add(1.0)
        return self.body(x) * self.recent[0] * self.slotted.scale * self.shared


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "zero", -0.0),
        lambda model: setattr(model, "zeros", (-0.0, 1)),
        lambda model: model.recent.__setitem__(0, 4.0),
        lambda model: setattr(model.slotted, "scale", 4.0),
        lambda _: setattr(Picky, "shared", 5.0),
    ],
    ids=["zero", "zero in a tuple", "deque", "slots", "class"],
)
def test_a_value_that_looks_alike_plans_again(change, monkeypatch):
    monkeypatch.setattr(Picky, "shared", 2.0)
    pair = WholeStep(Picky(), sgd, vectors(1)[0]).run(vectors(2))
    pair.change(change)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 1


SCALE = 1.0


def _scale():
    return SCALE


def _inner(loss):
    return loss * _scale()


def nested_loss(answer, target):
    return _inner(F.cross_entropy(answer, target))


def comprehended_loss(answer, target):
    return sum([F.cross_entropy(answer, target) * SCALE for _ in range(1)])


def inner_lambda_loss(answer, target):
    return (lambda: F.cross_entropy(answer, target) * SCALE)()


def _enclosing(function):
    return lambda answer, target: function(F.cross_entropy(answer, target))


@pytest.mark.parametrize(
    "loss", [nested_loss, comprehended_loss, inner_lambda_loss, _enclosing(_inner)],
    ids=["nested", "comprehension", "lambda", "closure"],
)  # fmt: skip
def test_values_that_functions_of_the_loss_read_are_followed(loss, monkeypatch):
    pair = WholeStep(mlp(), sgd, vectors(1)[0], loss).run(vectors(2))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 1
