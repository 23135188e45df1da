"""A planned module forwards what its model has and lets itself be looked at."""

import copy
import inspect
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import StepInputError
from olla_fx.arena import RunCounts
from tests.olla_fx.comparisons import assert_same, assert_same_gradients
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import mlp, sgd, vectors


def test_a_planned_module_within_a_model_that_is_planned():
    model, head = mlp(), nn.Linear(3, 3)
    eager = copy.deepcopy(nn.Sequential(model, head))
    outer = nn.Sequential(olla_fx.optimize(model, torch.ones(4, 6), fallback="raise"), head)
    x, y = vectors(1)[0]
    step = olla_fx.optimize(outer, x, solver="none", fallback="raise")
    for _ in range(3):
        for called in (eager, step):
            F.cross_entropy(called(x), y).backward()
        assert_same_gradients(eager, outer)


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
    """An attribute that is set only on the planned module would change nothing."""
    x = vectors(1)[0][0]
    pair = OwnLoop(Scaled(), x)
    step = pair.step
    for change in (
        lambda module: None,
        lambda module: setattr(module, "scale", 3.0),
        lambda module: module.grow(),
        lambda module: setattr(module, "body", copy.deepcopy(pair.eager.body)),
    ):
        for called, _, _ in pair.sides():
            change(called)
        assert_same(pair.eager(x), step(x), "answer")
    assert step.scale == pair.model.scale == 6.0
    assert step.width == 3
    step.note = "mine"
    assert not hasattr(pair.model, "note")
    assert copy.deepcopy(step).note == "mine"
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'nothing'"):
        step.nothing  # noqa: B018


@pytest.mark.parametrize(
    "name",
    ["counts", "binding", "graphed", "replans", "stock_runs", "outside_log", "cache", "options", "model"],
)
def test_an_attribute_of_the_model_is_not_hidden(name):
    model = mlp()
    setattr(model, name, 7)
    step = olla_fx.optimize(model, vectors(1)[0][0], solver="none", fallback="raise")
    assert getattr(step, name) == 7
    setattr(step, name, 8)
    assert getattr(model, name) == getattr(step, name) == 8
    assert step.stats.replans == 0


def test_inputs_are_given_by_name():
    x = vectors(1)[0][0]
    pair = OwnLoop(Scaled(), x)
    assert_same(pair.eager(x=x, shift=1.0), pair.step(x=x, shift=1.0), "answer")
    assert_same(pair.eager(x, shift=1.0), pair.step(x, shift=1.0), "answer")
    for _ in range(2):
        pair.poison()
        assert_same(pair.eager(x, negate=True), pair.step(x, negate=True), "answer")
    assert pair.step.stats.cached_plans == 3
    with pytest.raises(StepInputError, match="unexpected keyword argument 'other'"):
        pair.step(x, other=True)


class TakesAnything(nn.Module):
    """Takes a tensor, and others by any name."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, **others):
        return self.body(x) / others["count"]


def test_an_example_by_name():
    x, y = vectors(1)[0]
    example = {"count": torch.tensor(3), "x": x}
    pair = OwnLoop(TakesAnything(), example)
    for count in (3, 4, 5):
        pair.poison()
        for called, _, _ in pair.sides():
            F.cross_entropy(called(x, count=torch.tensor(count)), y).backward()
        pair.compare_gradients()
    assert_same(pair.eager(**example), pair.step(**example), "answer")
    assert pair.step.stats.cached_plans == 1
    pair.assert_served()


class TakesDictionary(nn.Module):
    def forward(self, batch):
        return batch["x"] * batch["scale"]


def test_an_example_that_is_a_dictionary():
    batch = {"x": torch.randn(4, requires_grad=True), "scale": torch.randn(4)}
    step = olla_fx.optimize(TakesDictionary(), batch, solver="none", fallback="raise")
    assert_same(TakesDictionary()(batch), step(batch), "answer")
    assert step.stats.cached_plans == 1


def test_a_planned_module_shows_class_and_signature_of_its_model():
    model, x = Scaled(), vectors(1)[0][0]
    step = olla_fx.optimize(model, x, solver="none")
    assert isinstance(step, Scaled)
    assert isinstance(step, olla_fx.PlannedModule)
    assert step.__class__ is Scaled
    assert inspect.signature(step.forward) == inspect.signature(model.forward)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert isinstance(other, olla_fx.PlannedModule)
        assert inspect.signature(other.forward) == inspect.signature(model.forward)
        assert_same(model(x), other(x), "answer")
    whole = olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=sgd(model.parameters()))
    assert [*inspect.signature(whole.forward).parameters] == ["inputs", "named"]


def test_a_parametrization_of_the_model_itself():
    """It gives the module another class."""
    pair = OwnLoop(nn.Linear(6, 3), vectors(1)[0][0])
    for called, _, _ in pair.sides():
        nn.utils.parametrizations.weight_norm(called)
    assert isinstance(pair.step, type(pair.model))
    for _ in range(2):
        pair.zero_grad()
        for loss in pair.losses(vectors(1)[0]):
            loss.backward()
        pair.compare_gradients()


def test_forward_may_be_replaced():
    """As accelerate does where it wraps a model for autocast."""
    model, x = Scaled(), vectors(1)[0][0]
    step = olla_fx.optimize(model, x, solver="none")
    forward = step.forward.__func__
    step.forward = types.MethodType(lambda self, *inputs: forward(self, *inputs) + 1, step)
    assert_same(model(x) + 1, step(x), "answer")
    assert "forward" not in vars(model)


def test_a_first_and_a_second_call():
    pair = WholeStep(mlp(), sgd, vectors(1)[0])
    assert pair.step.stats.counts.served == 0
    assert pair.step.stats.outside_log == ()
    pair.step.poison()
    pair.run(vectors(1))
    # Recorded on the stock allocator.
    assert pair.step.stats.counts == RunCounts()
    assert pair.step.stats.outside_log == ()
    pair.run(vectors(1))
    assert pair.step.stats.counts.served_bytes > 0
    assert pair.step.stats.counts.requests_on_worker_threads == 0


def test_the_graph_module_in_force_is_readable():
    pair = WholeStep(mlp(), sgd, vectors(1)[0])
    pair.run(vectors(2))
    assert "# t=0 " in pair.step.graph_module.code
    assert "lives [" in pair.step.graph_module.code
    pair.step.graph_module.graph.lint()


def test_a_planned_container_is_one():
    x = vectors(1)[0][0]
    pair = OwnLoop(mlp(), x)
    model, step = pair.model, pair.step
    assert len(step) == len(model) == 3
    assert [*step] == [*model]
    assert (step[0], step[-1]) == (model[0], model[-1])
    assert [*step[1:]] == [*model[1:]]
    assert model[1] in step
    assert nn.ReLU() not in step
    for container in (pair.eager, step):
        container[1] = nn.GELU()
    assert_same(pair.eager(x), step(x), "answer")
    for container in (pair.eager, step):
        del container[1]
    assert_same(pair.eager(x), step(x), "answer")


class Named(nn.ModuleDict):
    def forward(self, x):
        return self["body"](x)


def test_a_planned_module_that_names_its_parts():
    step = olla_fx.optimize(Named({"body": nn.Linear(6, 3)}), vectors(1)[0][0], solver="none")
    assert [*step] == [*step.keys()] == ["body"]
    assert "body" in step
    assert step["body"].out_features == 3


def test_a_model_that_is_no_container_says_so_itself():
    model = Scaled()
    step = olla_fx.optimize(model, vectors(1)[0][0], solver="none")
    assert step, "it has no length to be false by"

    def remove(module):
        del module[0]

    for use in (len, iter, lambda module: module[0], lambda module: 0 in module, remove):
        for module in (model, step):
            with pytest.raises(TypeError, match="Scaled"):
                use(module)
