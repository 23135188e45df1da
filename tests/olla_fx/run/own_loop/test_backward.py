"""Backward passes: repeated, partial, refused."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.errors import BackwardError
from tests.olla_fx.harness import assert_same, assert_same_models, is_busy
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors


def test_one_backward_serves_all_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.one(x), self.other(x)

    eager = Two()
    module = olla_fx.optimize(copy.deepcopy(eager), torch.ones(4, 6))
    for _ in range(2):
        one, other = module(torch.ones(4, 6))
        one.sum().backward()
        with pytest.raises(olla_fx.OllaError, match="All outputs of a forward share one backward"):
            other.sum().backward()
        assert not is_busy(module)
    for planned in (eager, module):
        planned.zero_grad()
        one, other = planned(torch.ones(4, 6))
        one.sum().backward(retain_graph=True)
        other.sum().backward()
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert_same(theirs.grad, mine.grad, "gradient")


class OwnLoop:
    """One model twice, from the same weights: in an eager loop, and in the same loop around a planned one."""

    def __init__(self, model, example, make=sgd, loss_fn=F.cross_entropy, context=nullcontext):
        self.eager, self.model = copy.deepcopy(model), model
        self.optimizers = [make(each.parameters()) for each in (self.eager, model)]
        self.loss_fn, self.context = loss_fn, context
        self.planned = olla_fx.optimize(model, example, solver="none")
        self.calls = 0

    def losses(self, *batch):
        """Forward and loss of both, from the same random numbers."""
        *inputs, target = batch
        if not self.planned.is_busy:
            self.planned.poison()
        losses = []
        for module in (self.eager, self.planned):
            torch.manual_seed(self.calls)
            with self.context():
                losses.append(self.loss_fn(module(*inputs), target))
        self.calls += 1
        assert_same(losses[0].detach(), losses[1].detach(), "loss")
        return losses

    def compare_gradients(self):
        for (name, one), other in zip(self.eager.named_parameters(), self.model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None:
                assert_same(one.grad, other.grad, f"gradient of {name}")

    def step(self, *batch):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        assert not self.planned.is_busy
        for loss in self.losses(*batch):
            loss.backward()
        self.compare_gradients()
        for optimizer in self.optimizers:
            optimizer.step()

    def run(self, batches):
        for batch in batches:
            self.step(*batch)
        assert_same_models(self.eager, self.model)
        return self

    def assert_served(self):
        assert self.planned.binding == "buffer"
        assert not self.planned.is_busy
        assert self.planned.counts.served > 0
        assert self.planned.counts.outside == 0, self.planned.outside_log
        assert self.planned.stock_runs == 0


def test_backward_twice():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(2))
    losses = pair.losses(images(1)[0])
    for loss in losses:
        loss.backward(retain_graph=True)
    assert is_busy(pair.step)
    for loss in losses:
        loss.backward()
    pair.compare_gradients()
    assert not is_busy(pair.step)
    output = pair.step(images(1)[0][0])
    output.sum().backward(retain_graph=False)
    with pytest.raises(RuntimeError, match="retain_graph"):
        output.sum().backward()
    pair.eager.load_state_dict(pair.model.state_dict())
    pair.run(images(2))


def test_a_first_backward_that_is_retained():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    losses = pair.losses(images(1)[0])
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    pair.compare_gradients()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.run(images(4))
    pair.assert_served()


@pytest.mark.parametrize("reduce", [torch.sum, lambda output: output.square().sum()], ids=["sum", "squares"])
def test_gradients_of_gradients_are_refused(reduce):
    """A sum's tangent wants no gradient: a penalty on the gradient must not be lost for that."""
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    loss = reduce(pair.step(vectors(1)[0][0]))
    (gradient,) = torch.autograd.grad(loss, [pair.model[0].weight], create_graph=True)
    with pytest.raises(BackwardError, match="gradients of gradients"):
        (gradient.square().sum() + pair.model[0].weight.sum()).backward()
    del gradient, loss
    pair.model.zero_grad()
    pair.run(vectors(20))
    pair.assert_served()


@pytest.mark.parametrize("of", ["input", "weight", "tangent"])
def test_gradients_of_gradients_are_refused_for_whatever_they_are_asked(of):
    """A physics-informed loss asks for the second derivative by the inputs: it is no constant."""
    x = vectors(1)[0][0].requires_grad_()
    pair = OwnLoop(mlp(), x)
    answer = pair.step(x)
    tangent = torch.ones_like(answer).requires_grad_()
    (gradient,) = torch.autograd.grad(answer, x, tangent, create_graph=True)
    source = {"input": x, "weight": pair.model[0].weight, "tangent": tangent}[of]
    with pytest.raises(BackwardError, match="gradients of gradients"):
        torch.autograd.grad(gradient.sum(), source, allow_unused=True)
    del gradient, answer
    assert not is_busy(pair.step)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_that_might_be_differentiated_and_is_not():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for batch in vectors(3):
        for loss in pair.losses(batch):
            loss.backward(create_graph=True)
        pair.compare_gradients()
        for model in (pair.eager, pair.model):
            model.zero_grad()


@pytest.mark.parametrize("what", ["parameter", "input", "output"])
def test_what_backward_needs_and_was_changed(what):
    """As in eager; the buffer is free again."""
    pair = OwnLoop(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), vectors(1)[0][0].requires_grad_())
    x = vectors(1)[0][0].requires_grad_()
    answer = pair.step(x)
    changed = {"parameter": pair.model[0].weight, "input": x, "output": answer}[what]
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        answer.sum().backward()
    del answer
    assert not is_busy(pair.step)


def test_an_output_may_be_changed_where_backward_does_not_need_it():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for x, y in vectors(3):
        for module in (pair.eager, pair.step):
            F.cross_entropy(module(x).mul_(2).relu_(), y).backward()
        pair.compare_gradients()


def test_errors_have_one_base():
    assert issubclass(BackwardError, olla_fx.OllaError)
    assert issubclass(BackwardError, RuntimeError)


class Written(nn.Module):
    """A model given by a function of its modules and inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        self.l, self.k = nn.Linear(6, 6), nn.Linear(6, 6)
        for name, part in parts.items():
            if (
                isinstance(part, torch.Tensor)
                and not isinstance(part, nn.Parameter)
                and not part.requires_grad
            ):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def test_a_buffer_that_was_updated_again_before_backward():
    def state(self, x):
        self.st.mul_(0.5).add_(x.detach().mean(0))
        return self.l(x) * self.st

    planned = olla_fx.optimize(Written(state, st=torch.ones(6)), torch.ones(4, 6), solver="none")
    first, second = planned(torch.randn(4, 6)), planned(torch.randn(4, 6))
    second.sum().backward()
    with pytest.raises(RuntimeError, match="changed in place"):
        first.sum().backward()
    assert not is_busy(planned)
