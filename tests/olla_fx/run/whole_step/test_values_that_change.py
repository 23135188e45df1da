"""Python values that a plan depends on are compared exactly."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import ADAMW, Written, mlp, sgd, vectors


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


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def _of_the_default_dtype():
    return Written(lambda model, x: model.body(x) * torch.full((3,), 0.1), body=mlp())


@pytest.mark.parametrize("make", [sgd, ADAMW])
def test_another_default_dtype_plans_a_whole_step_again(make, default_dtype):
    batches = vectors(6)
    pair = WholeStep(_of_the_default_dtype(), make, batches[0]).run(batches[:2])
    default_dtype(torch.float64)
    pair.run(batches[2:4])
    assert pair.step.stats.replans == 1
    default_dtype(torch.float32)
    pair.run(batches[4:])
    assert pair.step.stats.replans == 1  # as it was at first


def test_another_default_dtype_plans_a_loop_again(default_dtype):
    batches = vectors(4)
    pair = OwnLoop(_of_the_default_dtype(), batches[0][0]).run(batches[:2])
    default_dtype(torch.float64)
    pair.run(batches[2:])
    assert pair.step.stats.replans == 1


def test_another_default_device_plans_again():
    """Where eager mixes devices and raises, the step must not answer."""
    batch = vectors(1)[0]
    pair = WholeStep(_of_the_default_dtype(), sgd, batch).run(vectors(2))
    with torch.device("cpu"):
        pair.run([batch])
    assert pair.step.stats.replans == 0
    with torch.device("meta"), pytest.raises(RuntimeError):
        pair.train_eager(batch)
    with torch.device("meta"), pytest.raises(olla_fx.CaptureError):
        pair.step(*batch)
