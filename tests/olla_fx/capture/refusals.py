"""Plan a model that is to be refused, and see that this changes nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import CaptureError, OllaError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.helpers import mlp, sgd, vectors


class Changed(nn.Module):
    """A small model with one bad habit."""

    def __init__(self, habit, **parts):
        super().__init__()
        self.body = mlp()
        self.habit = habit
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.habit(self, x)


def refused(model, said, kind=CaptureError, *, example=None, make=sgd, loss_fn=F.cross_entropy, **options):
    """Plan, expect a refusal, and see that nothing changed."""
    optimizer = make(model.parameters()) if make else None
    example = vectors(1)[0] if example is None else example
    values = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict()) if optimizer else None
    random = torch.get_rng_state()
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for function in (olla_fx.optimize, olla_fx.plan):
        with pytest.raises(kind, match=said) as caught:
            function(model, example, loss_fn=loss_fn, optimizer=optimizer, **options)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, OllaError)
    assert_same(values, model.state_dict(), "model")
    assert optimizer is None or state == optimizer.state_dict()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert attributes == {name: dict(module.__dict__) for name, module in model.named_modules()}


class Counter:
    calls = 0
