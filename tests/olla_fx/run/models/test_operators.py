"""Operators of all kinds train as in eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import MOMENTUM, Written, mlp, vectors


def indexing(self, x):
    x = self.body(x)
    x = x[:, torch.tensor([0, 2, 1])]
    zeros = torch.zeros(4, 3)
    zeros[torch.arange(4), torch.tensor([0, 1, 2, 0])] = x.mean(1)
    x = torch.where(x > 0, x + zeros, x * 0.1)
    x = x.scatter_add(1, torch.zeros(4, 3, dtype=torch.long), x).masked_fill(x > 2, 2.0)
    x = torch.einsum("ij,kj->ik", x, self.weight).cumsum(1)
    return (
        x.flip(0).roll(1, 0) + x.sort(1)[0] + x.topk(3)[0] + x.gather(1, torch.zeros(4, 3, dtype=torch.long))
    )


def writing(self, x):
    x = self.body(x)
    x[:, 0] = x[:, 1] * 2
    x[1:, 1:].mul_(0.5)
    copy = x.clone()
    copy += 1
    return copy * x @ self.weight


def drawing(self, x):
    x = self.body(x + torch.randn_like(x) + torch.rand(6))
    x = x + torch.normal(torch.zeros(3), torch.ones(3)) + torch.empty(3).uniform_() + torch.randperm(3)
    x = (
        x
        + torch.empty(3).exponential_()
        + torch.poisson(torch.ones(3))
        + torch.bernoulli(torch.full((3,), 0.5))
    )
    return F.gumbel_softmax(F.rrelu(x, training=True) @ self.weight, hard=True)


def frequencies(self, x):
    return torch.fft.irfft(
        torch.fft.rfft(self.body(x)) * torch.view_as_complex(self.weight[:2, :2].contiguous()), n=3
    )


def penalty(self, x):
    x = x.detach().requires_grad_()
    answer = self.body(x)
    (gradient,) = torch.autograd.grad(answer.sum(), x, create_graph=True)
    return answer + (gradient**2).mean() * self.weight.sum()


def constants(self, x):
    return (
        self.body(x) * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3) + self.weight.sum() * torch.ones(4, 3)
    )


def numbers(self, x):
    return self.body(x) * x.max().item() + self.weight.sum()


def hooked(self, x):
    x = self.body(x) @ self.weight
    x.register_hook(lambda gradient: gradient * 2)
    return x


def inner_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (self.body(x) @ self.weight).float()


def checkpointed(self, x):
    x = torch.utils.checkpoint.checkpoint(lambda y: F.dropout(self.body(y), 0.3), x, use_reentrant=False)
    return x @ self.weight


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient * (x.abs() < 1)


def straight_through(self, x):
    return Sign.apply(self.body(x)) @ self.weight


def linear_algebra(self, x):
    square = self.weight @ self.weight.t() + torch.eye(3)
    return self.body(x) * torch.logdet(square) + torch.linalg.svdvals(square)


@pytest.mark.parametrize(
    "forward",
    [
        indexing, writing, drawing, frequencies, penalty, constants, numbers, hooked, inner_autocast,
        checkpointed, straight_through, linear_algebra,
    ],
)  # fmt: skip
def test_operators(forward):
    model = Written(forward, body=mlp(), weight=nn.Parameter(torch.randn(3, 3)))
    WholeStep(model, MOMENTUM, vectors(1)[0]).run(vectors(4))


def test_kernels_whose_requests_depend_on_data_fall_through():
    """The matrix exponential picks its method by the norm: what was not recorded is served outside."""
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
    pair = WholeStep(nn.Sequential(orthogonal, nn.Tanh(), nn.Linear(6, 3)), MOMENTUM, vectors(1)[0])
    for x, y in vectors(5):
        expected = pair.train_eager((x, y))
        pair.step.poison()
        assert_same(expected, pair.step(x, y), "loss")
        assert pair.step.stats.binding == "buffer"
    assert pair.step.stats.counts.served > 0
    pair.compare()
