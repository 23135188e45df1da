"""What happens between a forward and a first backward whose gradients lie otherwise than was planned."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.errors import BackwardError
from tests.olla_fx.harness import assert_same, is_busy, stats
from tests.olla_fx.helpers import mlp

LAST = torch.channels_last


class Pictures(nn.Module):
    """Depends on a number, on a statistic that it updates, on random numbers and on its training flag."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.scale = nn.Conv2d(8, 2, 1), 1.0
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls.add_(1)
        hidden = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        return self.last(hidden * self.calls) * self.scale


def picture():
    return torch.randn(2, 3, 8, 8).to(memory_format=LAST)


def maps(answer):
    """Its gradient comes in rows."""
    return F.cross_entropy(answer, torch.ones(2, 8, 8, dtype=torch.long))


def in_both(model, example, loop, compare=assert_same, **options):
    """Run a loop, a function of what is called and of its model, in eager and planned; compare gradients."""
    eager = copy.deepcopy(model)
    planned = olla_fx.optimize(model, example, solver="none", **options)
    states = []
    for called, own in ((eager, eager), (planned, model)):
        torch.manual_seed(0)
        loop(called, own)
        states.append(torch.get_rng_state())
    assert_same(*states, "random state")
    assert_same(*(dict(each.named_buffers()) for each in (eager, model)), "buffers")
    for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            compare(one.grad, other.grad, f"gradient of {name}")
    assert not is_busy(planned)
    assert_settles(planned, example)


def assert_settles(planned, example):
    """Once gradients come in one layout, all is served from the buffer, whose old contents do not matter."""
    for _ in range(5):
        planned.poison()
        planned.zero_grad()
        planned(example).abs().square().sum().backward()
    assert stats(planned).binding == "buffer"
    assert stats(planned).counts.outside == 0, stats(planned).outside_log
    # A single layer has arguments and outputs only.
    assert (stats(planned).counts.served > 0) == (len(list(planned.modules())) > 2)


def assert_close(one, other, name):
    """To the last bits, which a forward that cannot be repeated leaves open."""
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-5), name


def flag(model, there):
    model.train(not there)


def number(model, there):
    model.scale = 0.25 if there else 1.0


def frozen(model, there):
    model.first.requires_grad_(not there)


@pytest.mark.parametrize("change", [flag, number, frozen])
def test_a_forward_is_not_repeated_for_another_state_that_has_a_plan(change):
    example = picture()

    def loop(called, own):
        change(own, True)
        for _ in range(2):
            maps(called(example)).backward()
        change(own, False)
        own.zero_grad()
        loss = maps(called(example))
        change(own, True)
        loss.backward()

    in_both(Pictures().to(memory_format=LAST), example, loop, assert_close)


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "last.weight", "x"])
def test_a_forward_is_not_repeated_with_values_that_changed_unseen(name):
    """Through ``.data``, which autograd does not count."""
    example = picture()

    def loop(called, own):
        x = example.clone(memory_format=torch.preserve_format)
        loss = maps(called(x))
        changed = x if name == "x" else own.get_parameter(name)
        changed.data.mul_(-1)
        loss.backward()

    in_both(Pictures().to(memory_format=LAST), example, loop, assert_close)


def test_a_spread_gradient_and_values_that_changed_unseen():
    x = torch.randn(5, 6)
    model = mlp()
    planned = olla_fx.optimize(model, x, solver="none")
    for _ in range(2):
        planned(x).sum().backward()
    loss = planned(x).square().sum()
    next(model.parameters()).data.zero_()
    with pytest.raises(BackwardError, match="another memory layout"):
        loss.backward()


def test_one_graph_and_gradients_in_several_layouts():
    example = picture()

    def loop(called, _):
        for _ in range(3):
            answer = called(example)
            answer.sum().backward(retain_graph=True)
            torch.rand(3)
            answer.square().mean().backward(retain_graph=True)
            answer.mean().backward()

    in_both(Pictures().to(memory_format=LAST), example, loop, assert_close)

    def in_pairs(called, _):
        for losses in ((torch.sum, maps), (maps, maps)):
            answer = called(example)
            for loss in losses:
                loss(answer).backward(retain_graph=True)

    in_both(Pictures(), example.contiguous(), in_pairs)


def test_gradients_of_conjugated_outputs():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))

        def forward(self, x):
            return x @ self.weight

    x = torch.randn(4, 5, dtype=torch.complex64)

    def loop(called, _):
        for _ in range(3):
            called(x).conj().sum().real.backward()
            (called(x).conj().imag.sum() + called(x).imag.sum()).backward()

    in_both(Product(), x, loop)


class Overlapping(torch.autograd.Function):
    """A sum whose gradient has several elements in one place, and yet no stride of 0."""

    @staticmethod
    def forward(ctx, answer):
        ctx.shape = answer.shape
        return answer.sum()

    @staticmethod
    def backward(ctx, gradient):
        rows, columns = ctx.shape
        return (torch.arange(float(rows + columns)) * gradient).as_strided(ctx.shape, (1, 1))


def test_gradients_that_overlap():
    x = torch.randn(4, 5)

    def loop(called, _):
        for _ in range(3):
            Overlapping.apply(called(x)).backward()
            called(x).square().sum().backward()

    in_both(nn.Sequential(nn.Linear(5, 6)), x, loop)


def test_a_sparse_gradient_is_refused():
    planned = olla_fx.optimize(mlp(), torch.randn(5, 6), solver="none")
    loss = F.embedding(torch.tensor([1, 3]), planned(torch.randn(5, 6)), sparse=True).sum()
    with pytest.raises(BackwardError, match="sparse"):
        loss.backward()
    assert not is_busy(planned)


def test_a_plan_that_had_to_go_meanwhile():
    x = torch.randn(5, 6)

    def loop(called, _):
        for power in (1, 1, 2, 1):
            answer = called(x)
            called(x[:1])
            answer.pow(power).sum().backward()

    in_both(mlp(), x, loop, most_plans=1)


def test_a_search_for_anomalies():
    example = picture()

    def loop(called, _):
        with torch.autograd.detect_anomaly():
            maps(called(example)).backward()
            called(example[:1]).sum().backward()
        assert not torch.is_anomaly_enabled()

    in_both(Pictures().to(memory_format=LAST), example, loop)
