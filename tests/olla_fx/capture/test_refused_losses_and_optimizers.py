"""Losses and optimizers that cannot be captured are refused with one clear line."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim

from olla_fx import UnsupportedOptimizerError
from tests.olla_fx.capture.refusals import refused
from tests.olla_fx.helpers import mlp, sgd


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (partial(F.cross_entropy, reduction="none"), r"scalar tensor, not \[4\]"),
        (lambda answer, target: 3.0, "scalar tensor, not float"),
        (lambda answer, target: target.sum().float(), "depends on no parameter"),
        (lambda answer, target: answer.detach().sum(), "depends on no parameter"),
        (lambda answer: answer.sum(), "TypeError"),
        (lambda answer, target: answer.sum() if answer.sum() > 0 else -answer.sum(), "depend on the values"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_losses(loss_fn, said):
    refused(mlp(), said, loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (optim.LBFGS, "LBFGS .*closure.*Use one of SGD, Adam"),
        (optim.RAdam, "RAdam .*step number"),
        (optim.ASGD, "ASGD .*step number"),
        (lambda parameters: optim.SparseAdam(list(parameters)), "SparseAdam .*sparse"),
        (lambda parameters: optim.SGD(parameters, lr=torch.tensor(0.1)), "lr is a tensor.*number"),
        (partial(optim.Adam, differentiable=True), "differentiable=True"),
    ],
    ids=["LBFGS", "RAdam", "ASGD", "SparseAdam", "tensor", "differentiable"],
)
def test_optimizers(make, said):
    refused(mlp(), said, UnsupportedOptimizerError, make=make)


def test_an_optimizer_of_ones_own():
    class Own(optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    refused(mlp(), "Own is not an optimizer that can be captured", UnsupportedOptimizerError,
            make=lambda parameters: Own(parameters, lr=0.1))  # fmt: skip


def test_an_optimizer_over_other_parameters():
    other = mlp()
    refused(mlp(), r"shape \[8, 6\] that is no parameter of the model", UnsupportedOptimizerError,
            make=lambda _: sgd(other.parameters()))  # fmt: skip
