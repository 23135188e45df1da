"""Side effects of a forward or a loss are refused with the cause."""

import collections
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx import CaptureError
from tests.olla_fx.capture.refusals import Changed, Counter, refused
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import mlp, sgd, vectors


class Advancing(nn.Module):
    def __init__(self, source, draw):
        super().__init__()
        self.body = mlp()
        self.source = source
        self.draw = draw

    def forward(self, x):
        return self.body(x) * self.draw(self.source)


@pytest.mark.parametrize(
    ("source", "draw"),
    [
        (itertools.count(1), next),
        (iter([1.0, 2.0, 3.0]), next),
        (itertools.cycle([1.0, 2.0]), next),
        (random.Random(1), lambda source: source.random()),
        (np.random.default_rng(1), lambda source: float(source.random())),
        (np.random.RandomState(1), lambda source: float(source.rand())),
        (torch.Generator(), lambda source: torch.rand((), generator=source)),
        (collections.deque([1.0, 2.0]), lambda source: source.popleft()),
    ],
    ids=["count", "list", "cycle", "random", "numpy", "RandomState", "torch", "deque"],
)
def test_an_iterator_that_forward_advances_is_refused(source, draw):
    with pytest.raises(CaptureError, match=r"'source'|torch\.Generator"):
        WholeStep(Advancing(source, draw), sgd, vectors(1)[0])


@pytest.mark.parametrize(
    "seed",
    [lambda _: torch.manual_seed(3).initial_seed(), lambda _: torch.random.seed()],
    ids=["manual", "seed"],
)
def test_seeding_within_forward_is_refused(seed):
    functions = torch.manual_seed, torch.random.seed
    with pytest.raises(CaptureError, match="seeds torch's random numbers"):
        WholeStep(Advancing(None, seed), sgd, vectors(1)[0])
    assert functions == (torch.manual_seed, torch.random.seed)


def count_calls(self, x):
    self.calls += 1
    return self.body(x)


def keep_hidden(self, x):
    self.hidden = self.body(x)
    return self.hidden


def grow_history(self, x):
    self.history.append(1)
    return self.body(x)


def count_in_dict(self, x):
    self.counts["calls"] += 1
    return self.body(x) * self.counts["calls"]


def count_in_object(self, x):
    self.counter.calls += 1
    return self.body(x) * self.counter.calls


def swap_in_list(self, x):
    self.history[0] = x.mean()
    return self.body(x)


@pytest.mark.parametrize(
    ("habit", "part", "value"),
    [
        (count_calls, "calls", 0),
        (keep_hidden, "hidden", None),
        (grow_history, "history", []),
        (count_in_dict, "counts", {"calls": 0}),
        (count_in_object, "counter", Counter()),
        (swap_in_list, "history", [0]),
    ],
)
def test_side_effects(habit, part, value):
    refused(Changed(habit, **{part: value}), f"changes its attribute '{part}.*registered buffer")


def test_a_tensor_in_a_container_that_is_written_to():
    def habit(self, x):
        self.kept[0].add_(1)
        return self.body(x) * self.kept[0]

    refused(Changed(habit, kept=[torch.zeros(3)]), "kept|container|buffer")


def test_a_parameter_that_hides_in_a_list_is_trained_or_refused():
    model = Changed(lambda self, x: F.linear(self.body(x), self.weights[0]), own=nn.Linear(3, 3, bias=False))
    model.weights = [model.own.weight]
    refused(model, r"own\.weight")


class CountingLoss(nn.Module):
    calls = 0

    def forward(self, answer, target):
        self.calls += 1
        return F.cross_entropy(answer, target) * self.calls


class RememberingLoss:
    def __init__(self):
        self.calls = []

    def __call__(self, answer, target):
        self.calls.append(1)
        return F.cross_entropy(answer, target)


@pytest.mark.parametrize(
    ("make_loss", "said"), [(CountingLoss, "calls"), (RememberingLoss, "RememberingLoss.calls")]
)
def test_losses_with_side_effects(make_loss, said):
    loss_fn = make_loss()
    refused(mlp(), said, loss_fn=loss_fn)
    assert not loss_fn.calls
