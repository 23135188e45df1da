"""What ``optimize`` and ``plan`` cannot take is named in one line, with what to give instead."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler

import olla_fx
from olla_fx import CaptureError, UnsupportedOptimizerError
from tests.olla_fx.helpers import mlp, sgd, vectors

FUNCTIONS = [olla_fx.optimize, olla_fx.plan]


def refusal(function, model, kind=CaptureError, **arguments):
    with pytest.raises(kind) as caught:
        function(model, vectors(1)[0], **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("model", "given", "instead"),
    [
        (None, "None", "nn.Module"),
        (F.relu, "the function 'relu'", "nn.Module whose forward calls it"),
        (mlp().forward, "the method 'Sequential.forward'", "nn.Module whose forward calls it"),
        (nn.Linear, "the class Linear", r"Linear(...)"),
        ("resnet18", "of type str", "nn.Module"),
        ([mlp()], "of type list", "nn.Sequential"),
    ],
    ids=["None", "function", "method", "class", "str", "list"],
)
def test_a_model_that_is_none(function, model, given, instead):
    said = refusal(function, model)
    assert said.startswith(f"model is {given}: ")
    assert instead in said


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("make", "given", "instead"),
    [
        (lambda own: [own, own], "of type list", "parameter groups"),
        (lambda own: (own,), "of type tuple", "parameter groups"),
        (lambda own: {"body": own}, "of type dict", "parameter groups"),
        (lambda own: optim.AdamW, "the class AdamW", "AdamW(...)"),
        (lambda own: functools.partial(optim.SGD, lr=0.1), "of type partial", "torch.optim.SGD"),
        (lambda own: lr_scheduler.StepLR(own, 1), "of type StepLR", "scheduler's optimizer"),
        (
            lr_scheduler.ReduceLROnPlateau,
            "of type ReduceLROnPlateau",
            "scheduler's optimizer",
        ),
        (lambda own: "sgd", "of type str", "torch.optim.SGD"),
    ],
    ids=["list", "tuple", "dict", "class", "partial", "scheduler", "plateau", "str"],
)
def test_an_optimizer_that_is_none(function, make, given, instead):
    model = mlp()
    said = refusal(
        function,
        model,
        UnsupportedOptimizerError,
        loss_fn=F.cross_entropy,
        optimizer=make(sgd(model.parameters())),
    )
    assert said.startswith(f"optimizer is {given}: ")
    assert instead in said


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("loss_fn", "given", "instead"),
    [
        (nn.CrossEntropyLoss, "the class CrossEntropyLoss", "CrossEntropyLoss(...)"),
        ("cross_entropy", "of type str", "loss_fn(outputs, target)"),
        (torch.zeros(()), "of type Tensor", "loss_fn(outputs, target)"),
    ],
    ids=["class", "str", "tensor"],
)
def test_a_loss_that_is_none(function, loss_fn, given, instead):
    model = mlp()
    said = refusal(function, model, loss_fn=loss_fn, optimizer=sgd(model.parameters()))
    assert said.startswith(f"loss_fn is {given}: ")
    assert instead in said
