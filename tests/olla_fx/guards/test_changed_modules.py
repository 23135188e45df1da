"""Changes between two calls by which Python finds other values in a model: planned again, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.capture.optimizer import initial_state
from olla_fx.guards import Mismatch, Prologue
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import assert_served

Change = Callable[[nn.Module], object]


class Doubling(nn.Linear):
    """A linear layer of another class."""

    def forward(self, x):
        return super().forward(x) * 2


class Reader(nn.Module):
    """Reads what it has from everywhere Python looks."""

    gain = 2.0

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.act = nn.ReLU()
        self.rest = nn.Sequential(self.first, nn.Tanh(), nn.Linear(4, 4), self.act)
        self.maybe = None
        self.register_module("extra", None)
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.factor = torch.full((4,), 3.0)
        self.scale = 1.5
        self.shapes = [1, 2]

    @property
    def power(self):
        return 2

    def forward(self, x):
        hidden = self.act(self.first(x)) * self.scale * self.gain + self.shift
        hidden = self.rest(hidden) ** self.power * self.factor * len(self.shapes)
        return hidden if self.extra is None else self.extra(hidden)


def _replace_missing_bias(model: nn.Module) -> None:
    del model.first.bias
    model.first.bias = torch.ones(4)


def _replace_missing_child(model: nn.Module) -> None:
    del model.extra
    model.extra = torch.tanh


CHANGES: dict[str, Change] = {
    "a child is there a second time": lambda model: model.rest.append(model.rest[1]),
    "a shared child in place of another": lambda model: model.rest.__setitem__(0, model.act),
    "one shared child for the other": lambda model: model.rest.__setitem__(3, model.first),
    "a shared child where none was": lambda model: setattr(model, "extra", model.act),
    "the class of a child": lambda model: setattr(model.act, "__class__", nn.Tanh),
    "the class of a layer": lambda model: setattr(model.first, "__class__", Doubling),
    "a tensor for a bias that was None": _replace_missing_bias,
    "a function for a child that was None": _replace_missing_child,
    "an attribute hides a child": lambda model: model.__dict__.update(act=torch.tanh),
    "an attribute hides a parameter": lambda model: model.first.__dict__.update(weight=torch.ones(4, 4)),
    "an attribute hides the class's": lambda model: setattr(model, "gain", 5.0),
}
CLASS_CHANGES: dict[str, tuple[str, object]] = {
    "forward": ("forward", lambda self, x: self.first(x).exp().sum(1)),
    "a property": ("power", property(lambda self: 3)),
    "a value": ("gain", 7.0),
    "what hides a child": ("act", staticmethod(torch.tanh)),
    "what hides an attribute": ("scale", property(lambda self: 5.0)),
    "what hides a buffer": ("shift", 9.0),
}


def _equal(planned: olla_fx.PlannedModule, eager: nn.Module) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(3, 4)
        planned.poison()
        with torch.no_grad():
            assert_same(planned(x), eager(x), "outputs")
    assert_served(planned)


@pytest.mark.parametrize("change", CHANGES)
def test_other_values_in_a_module(change: str) -> None:
    eager = Reader().eval()
    model = copy.deepcopy(eager)
    planned = olla_fx.optimize(model, torch.randn(3, 4), solver="none", fallback="raise")
    _equal(planned, eager)
    CHANGES[change](model)
    CHANGES[change](eager)
    _equal(planned, eager)
    assert planned.stats.replans == 1


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("change", CLASS_CHANGES)
def test_other_values_in_a_class(change: str, inherited: bool) -> None:
    base = type("Base", (Reader,), {})
    eager = type("Own", (base,), {})().eval()
    model = copy.deepcopy(eager)
    planned = olla_fx.optimize(model, torch.randn(3, 4), solver="none", fallback="raise")
    _equal(planned, eager)
    setattr(base if inherited else type(model), *CLASS_CHANGES[change])
    _equal(planned, eager)
    assert planned.stats.replans == 1


@pytest.mark.parametrize("key", ["shift", "factor"])
def test_a_gradient_that_is_wanted_later(key: str) -> None:
    eager = Reader()
    model = copy.deepcopy(eager)
    planned = olla_fx.optimize(model, torch.randn(3, 4), solver="none", fallback="raise")
    x = torch.randn(3, 4)
    for wanted in (False, True, True, False):
        for holder, called in ((eager, eager), (model, planned)):
            getattr(holder, key).requires_grad_(wanted)
            getattr(holder, key).grad = None
            called(x).sum().backward()
        assert (getattr(model, key).grad is not None) == wanted
        assert_same(getattr(model, key).grad, getattr(eager, key).grad, key)


def test_an_equal_value_needs_one_close_look() -> None:
    model = Reader().eval()
    x = torch.randn(3, 4)
    planned = olla_fx.optimize(model, x, solver="none", fallback="raise")
    captured = capture(StepRequest(model, (x,), Mode.INFERENCE))
    prologue = Prologue(captured, model, None, None, initial_state)
    values = prologue.run([x])
    assert not isinstance(values, Mismatch)
    assert len(values) == len(prologue.check([x]))
    source = prologue.source
    model.scale = float("1.5")
    assert prologue.check([x]) is not None
    model.shapes = [1, 2]
    assert prologue.check([x]) is None
    assert not isinstance(prologue.run([x]), Mismatch)
    assert prologue.check([x]) is not None
    assert prologue.source == source
    _equal(planned, model)
    assert planned.stats.replans == 0
