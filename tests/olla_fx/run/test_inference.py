"""Planned inference equals eager and follows the model's weights."""

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx import StepModeError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import check_inference
from tests.olla_fx.helpers import mlp, vectors


def test_inference_follows_the_models_weights():
    model = mlp().eval()
    step = check_inference(model, [(x,) for x, _ in vectors(3)], 1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    x = vectors(1)[0][0]
    with torch.no_grad():
        assert_same(model(x), step(x), "answer")
    assert step.stats.replans == 0


def test_inference_refuses_training_mode():
    model = mlp().eval()
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none", fallback="raise")
    model.train()
    with pytest.raises(StepModeError, match=r"model\.eval\(\)"):
        step(torch.ones(4, 6))


def test_inference_in_inference_mode():
    model = mlp().eval()
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none", fallback="raise")
    with torch.inference_mode():
        for x, _ in vectors(3):
            assert_same(model(x), step(x), "answer")
    with torch.no_grad():
        assert_same(model(x), step(x), "answer outside of inference mode")


def test_one_tensor_needs_no_tuple():
    model = mlp().eval()
    step = olla_fx.optimize(model, torch.ones(4, 6), solver="none", fallback="raise")
    with torch.no_grad():
        assert torch.equal(model(torch.ones(4, 6)), step(torch.ones(4, 6)))


def test_a_model_without_parameters():
    step = olla_fx.optimize(nn.Softmax(1).eval(), torch.ones(4, 6), solver="none", fallback="raise")
    for _ in range(3):
        assert torch.equal(step(torch.eye(4, 6)), torch.eye(4, 6).softmax(1))


def test_a_model_that_does_nothing():
    step = olla_fx.optimize(nn.Identity().eval(), torch.ones(4, 6), solver="none", fallback="raise")
    for _ in range(3):
        assert torch.equal(step(torch.eye(4, 6)), torch.eye(4, 6))
    assert step.plan.buffer_bytes == 0
