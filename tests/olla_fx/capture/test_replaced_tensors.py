"""Tensors of the model: what forward writes to them is followed; another tensor in their place is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import mlp, sgd, vectors


class Averaging(nn.Module):
    """Updates an average in a way of choice."""

    def __init__(self, update):
        super().__init__()
        self.body = mlp()
        self.register_buffer("ema", torch.zeros(6))
        self.loose = torch.zeros(6)
        self.weight = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.update = update

    def forward(self, x):
        self.update(self, x.mean(0))
        return self.body(x + self.ema + self.loose + self.weight)


def replace_buffer(model, mean):
    model.ema = model.ema * 0.9 + 0.1 * mean


def replace_loose(model, mean):
    model.loose = model.loose * 0.9 + 0.1 * mean


def replace_parameter(model, mean):
    model.weight = nn.Parameter(model.weight * 0.9 + 0.1 * mean, requires_grad=False)


def replace_memory(model, mean):
    model.ema.data = model.ema * 0.9 + 0.1 * mean


def replace_memory_of_parameter(model, mean):
    model.weight.data = model.weight.data * 0.9 + 0.1 * mean


def new_buffer(model, mean):
    model.register_buffer("late", mean)


@pytest.mark.parametrize(
    ("update", "name"),
    [
        (replace_buffer, "ema"),
        (replace_loose, "loose"),
        (replace_parameter, "weight"),
        (replace_memory, "ema"),
        (replace_memory_of_parameter, "weight"),
        (new_buffer, "late"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_a_tensor_that_forward_replaces_is_refused(update, name, mode):
    model, (x, target) = Averaging(update), vectors(1)[0]
    plan = {
        "training": lambda: WholeStep(model, sgd, (x, target)),
        "inference": lambda: olla_fx.optimize(model.eval(), (x,), solver="none", fallback="raise"),
        "own loop": lambda: olla_fx.optimize(model.train(), (x,), solver="none", fallback="raise"),
    }[mode]
    with pytest.raises(CaptureError, match=f"(?s)'{name}'.*copy_, mul_"):
        plan()


class Reshaping(nn.Module):
    """Changes the shape or the memory of one of its tensors in a way of choice."""

    def __init__(self, change):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.register_buffer("kept", torch.arange(36.0).view(6, 6))
        self.loose = torch.arange(36.0).view(6, 6)
        self.change = change

    def forward(self, x):
        self.change(self, x)
        return self.body(x.view(-1, 6)) + self.kept.sum(0) + self.loose.sum(0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model, x: x.unsqueeze_(0), "input 0"),
        (lambda model, x: x.resize_(4, 9), "input 0"),
        (lambda model, x: x.set_(torch.zeros(6, 6)), "input 0"),
        (lambda model, x: setattr(x, "data", torch.zeros(6, 6)), "input 0"),
        (lambda model, x: model.kept.t_(), "buffer 'kept'"),
        (lambda model, x: model.kept.set_(torch.zeros(6, 6)), "buffer 'kept'"),
        (lambda model, x: model.loose.as_strided_((3, 6), (6, 1)), "attribute 'loose'"),
        (lambda model, x: torch.no_grad()(model.body.weight.t_)(), "parameter 'body.weight'"),
    ],
    ids=["unsqueeze_", "resize_", "set_", "data", "t_", "buffer set_", "as_strided_", "parameter"],
)
@pytest.mark.parametrize("mode", ["training", "inference", "own loop"])
def test_a_tensor_that_forward_gives_another_shape_or_memory_is_refused(change, name, mode):
    """The graph would compute with the new shape, and the caller's tensor would keep the old one."""
    model, x = Reshaping(change), torch.ones(6, 6)
    plan = {
        "training": lambda: WholeStep(model, sgd, (x, torch.ones(6, 6)), F.mse_loss),
        "inference": lambda: olla_fx.optimize(model.eval(), x, solver="none"),
        "own loop": lambda: olla_fx.optimize(model.train(), x, solver="none"),
    }[mode]
    with pytest.raises(CaptureError, match=f"{name} another shape or other memory"):
        plan()
    assert x.shape == model.kept.shape == (6, 6)


def test_a_change_of_shape_that_forward_takes_back_is_followed():
    model = Reshaping(lambda model, x: (model.kept.t_().mul_(2), model.kept.t_()))
    WholeStep(model, sgd, (torch.ones(6, 6), torch.ones(6, 6)), F.mse_loss).run(
        [(torch.ones(6, 6), torch.ones(6, 6))] * 3
    )


def test_a_tensor_that_forward_writes_is_followed():
    WholeStep(Averaging(lambda model, mean: model.ema.mul_(0.9).add_(mean)), sgd, vectors(1)[0]).run(
        vectors(3)
    )
