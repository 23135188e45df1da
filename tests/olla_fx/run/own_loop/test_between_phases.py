"""What the caller sees and does between forward and backward has the effect that it has in eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from olla_fx.errors import BackwardError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import Written


class OwnExp(torch.autograd.Function):
    """Computes with its result in backward before it looks at the gradient."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, result = ctx.saved_tensors
        return (result * 2 + x.cos()) * gradient


def recomputed(function, x):
    return checkpoint(function, x, use_reentrant=False)


FORWARDS = {
    "powers": lambda self, x: x.pow(2) * self.w,
    "sigmoid": lambda self, x: torch.sigmoid(x * self.w),
    "exp": lambda self, x: torch.exp(x * self.w),
    "exp of a parameter": lambda self, x: x * (self.w.exp() + 1),
    "softmax": lambda self, x: torch.softmax(x * self.w, -1),
    "square root": lambda self, x: (x * x + self.w * self.w).sqrt(),
    "layer norm": lambda self, x: F.layer_norm(x * self.c, (6,), self.w),
    "own function": lambda self, x: OwnExp.apply(x * self.w),
    "view": lambda self, x: torch.exp(x * self.w)[:, :3],
    "largest": lambda self, x: (x * self.w).amax(-1, keepdim=True).expand_as(x) * x,
    "output used again": lambda self, x: (lambda y: (y, (y * y).sin() * self.w))(x.exp()),
    "copy of an output": lambda self, x: (lambda y: (y, y.clone() ** 2))(x * self.w),
    "where": lambda self, x: (lambda y: (y, torch.where(y > 1, y * y, y)))(x * self.w),
    "in place": lambda self, x: (x * self.w).mul_(2).sigmoid_(),
    "checkpoint": lambda self, x: recomputed(lambda x: torch.tanh(self.linear(x) * self.w), x * 2),
    "checkpoint of an output": lambda self, x: (
        lambda y: (y, recomputed(lambda y: y.exp() * self.w * self.c, y))
    )(x * self.w),
}

CHANGES = {
    "parameter": lambda model, x, outputs: model.w,
    "weight": lambda model, x, outputs: model.linear.weight,
    "buffer": lambda model, x, outputs: model.c,
    "input": lambda model, x, outputs: x,
    "first output": lambda model, x, outputs: outputs[0],
    "last output": lambda model, x, outputs: outputs[-1],
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_data_changed_between_forward_and_backward(forward):
    torch.manual_seed(0)
    model = Written(FORWARDS[forward], w=nn.Parameter(torch.rand(6) + 0.5), linear=nn.Linear(6, 6))
    model.register_buffer("c", torch.rand(6))
    values = torch.rand(4, 6) + 0.5
    pair = OwnLoop(model, values.clone().requires_grad_())
    for changed in CHANGES.values():

        def loop(called, model, changed=changed):
            x = values.clone().requires_grad_()
            outputs = called(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            loss = sum((output * 1).pow(2).sum() for output in outputs)
            tensor = changed(model, x, outputs)
            before = tensor.detach().clone()
            tensor.data.mul_(1.7)
            loss.backward()
            tensor.data.copy_(before)
            return x.grad

        for _ in range(3):
            pair.zero_grad()
            pair.run_loop(loop)
        pair.assert_served()


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())

    def forward(self, x):
        return recomputed(self.body, x)


def test_statistics_under_a_checkpoint_are_updated_in_forward_and_again_in_backward():
    x, z = torch.rand(4, 6), torch.rand(4, 6)

    def statistics(model):
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    def two_forwards(called, model):
        loss = called(x).sum() + called(z).pow(2).sum()
        between = statistics(model)
        loss.backward()
        return between

    def two_backwards(called, model):
        loss = called(x).pow(2).sum()
        between = [statistics(model)]
        loss.backward(retain_graph=True)
        between.append(statistics(model))
        loss.backward()
        return between

    pair = OwnLoop(Normalised(), x)
    for loop in (two_forwards, two_backwards) * 2:
        pair.zero_grad()
        pair.run_loop(loop, compare=lambda *tensors: torch.testing.assert_close(*tensors[:2]))


def test_a_weight_that_only_the_recomputation_reads_may_be_changed_in_place():
    def loop(called, model):
        output = called(x)
        with torch.no_grad():
            model.body[0].weight.mul_(1.5)
        output.sum().backward()

    x = torch.rand(4, 6)
    pair = OwnLoop(Normalised(), x)
    for _ in range(3):
        pair.zero_grad()
        pair.run_loop(loop)
    pair.assert_served()


def test_a_weight_under_a_checkpoint_that_is_changed_in_place_is_refused():
    """Eager would recompute with the new one, and not say so."""
    pair = OwnLoop(Normalised(), torch.rand(4, 6, requires_grad=True))
    for _ in range(2):
        loss = pair.step(torch.rand(4, 6, requires_grad=True)).sum()
        with torch.no_grad():
            pair.model.body[0].weight.mul_(2)
        with pytest.raises(BackwardError, match=r"body\.0\.weight was changed in place"):
            loss.backward()


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_other_data_between_forward_and_backward_is_refused(changed):
    """Eager goes on with the old data if it saved a view, and with the new if it saved the tensor."""
    model = Written(lambda self, x: torch.tanh(self.linear(x * self.w)), w=nn.Parameter(torch.ones(6)))
    model.linear = nn.Linear(6, 6)
    pair = OwnLoop(model, torch.ones(4, 6))
    for _ in range(3):
        pair.zero_grad()
        x = torch.ones(4, 6)
        loss = pair.step(x).sum()
        tensor = model.linear.weight if changed == "weight" else x
        before = tensor.data
        tensor.data = tensor.data * 2
        with pytest.raises(BackwardError, match="given other data after the forward"):
            loss.backward()
        tensor.data = before
        assert not pair.step.stats.is_busy
        pair.step(x).sum().backward()


def _other_data(outputs, model):
    outputs.data = outputs.data * 2


def _data_in_place(outputs, model):
    outputs.data.mul_(2)


def _other_weight(outputs, model):
    model[0].weight.data = model[0].weight.data * 2


@pytest.mark.parametrize("change", [_other_data, _data_in_place, _other_weight])
@pytest.mark.parametrize("layers", [[nn.Tanh()], [nn.Softmax(1)], [nn.Sigmoid(), nn.Flatten()], [nn.ReLU()]])
def test_data_of_an_output_that_backward_reads(change, layers):
    """Where eager goes on with what it has saved, or with what is there now, so does the planned backward."""
    pair = OwnLoop(nn.Sequential(nn.Linear(6, 6), *layers), torch.ones(4, 6))
    x = torch.randn(4, 6)
    for _ in range(4):
        pair.zero_grad()
        outcomes = []
        for called, model in ((pair.eager, pair.eager), (pair.step, pair.model)):
            outputs = called(x)
            change(outputs, model)
            outputs.sum().backward()
            outcomes.append([parameter.grad.clone() for parameter in model.parameters()])
        assert_same(*outcomes, "gradients")
    pair.assert_served()
