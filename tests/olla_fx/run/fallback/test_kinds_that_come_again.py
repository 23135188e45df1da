"""Calls that have no plan run in eager, and are planned when their kind comes again."""

import collections
import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.run.new_kinds import CALLS_BEFORE_WARNING
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop, assert_served
from tests.olla_fx.helpers import SmallNet, images, mlp, vectors
from tests.olla_fx.run.fallback.falling import own_loop, sizes_in_turn


def test_a_new_size_runs_in_eager_once(make):
    pair = make()
    eager_runs = []
    for batch in sizes_in_turn(8, 2, 5):
        pair.train(batch)
        eager_runs.append(pair.step.stats.eager_runs)
    pair.compare()
    assert eager_runs == [0, 1, 1, 1, 1, 1, 1, 1]
    assert pair.step.stats.cached_plans == 2
    assert_served(pair.step)


def test_sizes_that_never_come_again_are_never_planned(make):
    pair = make().run(sizes_in_turn(6, 3, 4, 5, 6, 7, 9))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (6, 1)


def test_more_sizes_than_plans(make):
    """Plans are not made in turn again and again, and one warning says what changes."""
    pair = make(cache_size_limit=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.run(sizes_in_turn(40, 3, 4, 5, 6))
    told = [str(warning.message) for warning in caught if "run in eager" in str(warning.message)]
    assert len(told) == 1
    assert "most calls of SmallNet" in told[0]
    assert "input 0 has shape" in told[0]
    planned = 40 - pair.step.stats.eager_runs
    assert planned >= 10
    assert pair.step.stats.cached_plans == 2


def test_sizes_are_symbols_from_the_second_new_one_on(make):
    pair = make(dynamic=None).run(sizes_in_turn(9, 2, 3, 4, 5, 6, 7, 9))
    assert (pair.step.stats.eager_runs, pair.step.stats.families) == (1, 1)
    assert_served(pair.step)


def test_every_kind_is_planned_at_once_if_asked(make):
    pair = make(fallback="raise").run(sizes_in_turn(4, 3, 4))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (0, 3)


def test_an_unknown_fallback(make):
    with pytest.raises(olla_fx.OptionError, match="'eager' or 'raise'"):
        make(fallback="sometimes")


class Weighted(nn.Module):
    """A model whose forward reads a number of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.weight = SmallNet(), 0.5

    def forward(self, x):
        if self.weight > 5:
            raise RuntimeError("too heavy")
        return self.net(x) * self.weight


def set_weight(weight):
    def change(model):
        model.weight = weight

    return change


class Exponential(Weighted):
    """Computes with its number what a graph cannot."""

    def forward(self, x):
        return self.net(x) * math.exp(self.weight)


def test_a_number_that_changes_at_every_call(make):
    pair = make(Exponential())

    def anneal():
        for index, batch in enumerate(images(CALLS_BEFORE_WARNING + 4)):
            pair.change(set_weight(0.5 - 0.01 * index))
            pair.train(batch)

    with pytest.warns(RuntimeWarning, match="most calls of Exponential run in eager.*weight changed. Keep"):
        anneal()
    pair.compare()
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (CALLS_BEFORE_WARNING + 3, 1)


def test_a_number_that_changes_once(make):
    pair = make(Weighted()).run(images(2))
    pair.change(set_weight(0.25))
    pair.run(images(3))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 2)
    assert_served(pair.step)


def test_a_state_that_comes_and_goes(make):
    pair = make(Weighted())
    for index, batch in enumerate(images(12)):
        pair.change(set_weight((0.5, 0.25)[index % 2]))
        pair.train(batch)
    pair.compare()
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 2)
    assert_served(pair.step)


def test_training_and_evaluation_in_turn():
    pair = own_loop(nn.Sequential(SmallNet(), nn.Dropout(0.5)))
    for batch in images(4):
        pair.train(batch)
        for _, model, _ in pair.sides():
            model.eval()
        with torch.no_grad():
            assert_same(pair.eager(batch[0]), pair.step(batch[0]), "evaluation")
        for _, model, _ in pair.sides():
            model.train()
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 2)


def test_a_layer_that_is_swapped(make):
    pair = make(nn.Sequential(SmallNet(), nn.Linear(5, 5), nn.ReLU())).run(images(2))
    pair.change(lambda model: model.__setitem__(2, nn.Tanh()))
    pair.run(images(4))
    assert pair.step.stats.eager_runs == 1
    assert_served(pair.step)


def test_forget_all_plans():
    pair = own_loop().run(sizes_in_turn(3, 2, 5))
    pair.replan()
    pair.run(sizes_in_turn(2, 2))
    assert (pair.step.stats.eager_runs, pair.step.stats.cached_plans) == (1, 1)
    assert_served(pair.step)


def test_gradients_that_come_in_another_layout():
    """The kind of call is known, so that the plan for the layout is made at once."""
    pair = OwnLoop(
        nn.Conv2d(3, 4, 3),
        images(1)[0][0],
        loss_fn=lambda outputs, _: (outputs.contiguous(memory_format=torch.channels_last) ** 2).sum(),
        fallback="eager",
    )
    for batch in images(4):
        pair.zero_grad()
        for loss in pair.losses(batch):
            loss.backward()
        pair.update()
    assert pair.step.stats.eager_runs == 0


def test_a_copy_counts_for_itself():
    pair = own_loop().run(sizes_in_turn(3, 2, 5))
    other = copy.deepcopy(pair.step)
    assert other.stats.eager_runs == 0
    x, y = images(1, batch=5)[0]
    F.cross_entropy(other(x), y).backward()
    assert other.stats.eager_runs == 1


class Either(nn.Module):
    """Takes one input or more."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, *more):
        return sum(map(self.body, more), self.body(x))


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (
            [lambda module, x, count=count: module(x, *[x] * count) for count in range(1, 20)],
            "another structure. Give it as many inputs",
        ),
        (
            [lambda module, x, size=size: module(x[:1].expand(size, -1)) for size in range(5, 24)],
            "has shape .*. Give it inputs of a few sizes",
        ),
    ],
    ids=["structure", "shape"],
)
def test_the_advice_fits_what_changes(calls, said):
    module, x = olla_fx.optimize(Either(), vectors(1)[0][0], dynamic=False), vectors(1)[0][0]
    with pytest.warns(RuntimeWarning, match=f"most calls of Either run in eager.*{said}"):
        collections.deque((call(module, x) for call in calls), maxlen=0)
