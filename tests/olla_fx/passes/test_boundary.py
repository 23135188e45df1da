"""Operators are sorted into forward and backward: what the caller must find done goes before the boundary."""

import pytest
import torch
from torch import nn

from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import SmallNet, Written, images, vectors


def code_of(model, example):
    """Return the code of forward and of backward."""
    return [phase.code for phase in OwnLoop(model, example).step.stats.graph_modules]


@pytest.mark.parametrize("operator", ["convolution.default", "batch_norm", "dropout_mask"])
def test_outputs_updates_and_random_draws_belong_to_forward(operator):
    forward, backward = code_of(SmallNet(), images(1)[0][0])
    assert operator in forward
    assert f"{operator}_backward" not in forward
    assert f"{operator}(" not in backward


def test_operators_that_read_parameters_belong_to_forward():
    """The caller may change a parameter afterwards."""
    model = Written(lambda self, x: x * self.scale.exp(), scale=nn.Parameter(torch.zeros(6)))
    forward, backward = code_of(model, vectors(1)[0][0])
    assert "aten.exp" in forward
    assert "aten.exp" not in backward


def test_what_backward_computes_of_inputs_belongs_to_backward():
    model = Written(lambda self, x: self.scale.pow(3) * x, scale=nn.Parameter(torch.ones(6)))
    forward, backward = code_of(model, vectors(1)[0][0])
    assert forward.count("aten.pow") == 1  # of three
    assert backward.count("aten.pow") == 1  # of two


def test_operators_that_need_a_gradient_of_an_output_belong_to_backward():
    forward, backward = code_of(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), vectors(1)[0][0])
    assert "sigmoid_backward" not in forward
    assert "sigmoid_backward" in backward
