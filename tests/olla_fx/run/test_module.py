"""A planned module forwards what its model has and lets itself be looked at."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import StepInputError
from tests.olla_fx.harness import WholeStep, assert_same, stats
from tests.olla_fx.helpers import mlp, sgd, vectors


def test_a_planned_module_within_a_model_that_is_planned():
    inner = olla_fx.optimize(mlp(), torch.ones(4, 6))
    outer = nn.Sequential(inner, nn.Linear(3, 3))
    reference = copy.deepcopy(nn.Sequential(inner._model, outer[1]))
    x, y = vectors(1)[0]
    planned = olla_fx.optimize(outer, x, solver="none")
    for _ in range(3):
        for module in (reference, planned):
            F.cross_entropy(module(x), y).backward()
        for one, other in zip(reference.parameters(), outer.parameters(), strict=True):
            assert_same(one.grad, other.grad, "gradient")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(6, 3), 2.0

    def forward(self, x, shift=0.0, *, negate=False):
        answer = self.body(x) * self.scale + shift
        return -answer if negate else answer

    def grow(self):
        self.scale *= 2

    @property
    def width(self):
        return self.body.out_features


def test_attributes_of_the_model():
    """One that is set on the planned module alone would change nothing."""
    model = Scaled()
    eager = copy.deepcopy(model)
    x = vectors(1)[0][0]
    planned = olla_fx.optimize(model, x, solver="none")
    for change in (
        lambda module: None,
        lambda module: setattr(module, "scale", 3.0),
        lambda module: module.grow(),
        lambda module: setattr(module, "body", copy.deepcopy(eager.body)),
    ):
        for module in (eager, planned):
            change(module)
        assert_same(eager(x).detach(), planned(x).detach(), "answer")
    assert planned.scale == model.scale == 6.0
    assert planned.width == 3
    planned.note = "mine"
    assert not hasattr(model, "note")
    assert copy.deepcopy(planned).note == "mine"
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'nothing'"):
        planned.nothing  # noqa: B018


def test_inputs_that_are_taken_by_name_only_may_be_left_out():
    model = Scaled()
    x = vectors(1)[0][0]
    planned = olla_fx.optimize(model, x, solver="none")
    assert_same(model(x=x, shift=1.0).detach(), planned(x=x, shift=1.0).detach(), "answer")
    assert_same(model(x, shift=1.0).detach(), planned(x, shift=1.0).detach(), "answer")
    with pytest.raises(StepInputError, match="'negate' by name only"):
        planned(x, negate=True)


def test_a_first_and_a_second_call():
    pair = WholeStep(mlp(), sgd, vectors(1)[0])
    assert stats(pair.step).counts.served == 0
    assert stats(pair.step).outside_log == ()
    pair.step.poison()
    pair.run(vectors(1))
    assert stats(pair.step).counts.served > 0
    pair.run(vectors(1))
    assert stats(pair.step).counts.served_bytes > 0
    assert stats(pair.step).counts.requests_on_worker_threads == 0


def test_the_graph_module_in_force_is_readable():
    pair = WholeStep(mlp(), sgd, vectors(1)[0])
    pair.run(vectors(2))
    assert "# t=0 " in pair.step.graph_module.code
    assert "lives [" in pair.step.graph_module.code
    pair.step.graph_module.graph.lint()
