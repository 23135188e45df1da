"""Backward passes: repeated, partial, refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.errors import BackwardError, OllaError
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import SmallNet, images, mlp, vectors
from tests.olla_fx.run.own_loop.written import two_layers


def test_one_backward_serves_all_outputs():
    pair = OwnLoop(two_layers(lambda self, x: (self.first(x), self.second(x))), torch.ones(4, 6))
    for _ in range(2):
        answer, other = pair.step(torch.ones(4, 6))
        answer.sum().backward()
        with pytest.raises(OllaError, match="All outputs of a forward share one backward"):
            other.sum().backward()
        assert not pair.step.stats.is_busy
    for called, model, _ in pair.sides():
        model.zero_grad()
        answer, other = called(torch.ones(4, 6))
        answer.sum().backward(retain_graph=True)
        other.sum().backward()
    pair.compare_gradients()


def test_backward_twice():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(2))
    losses = pair.losses(images(1)[0])
    for loss in losses:
        loss.backward(retain_graph=True)
    assert pair.step.stats.is_busy
    for loss in losses:
        loss.backward()
    pair.compare_gradients()
    assert not pair.step.stats.is_busy
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
    pair.zero_grad()
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


@pytest.mark.parametrize("source", ["input", "weight", "tangent"])
def test_gradients_of_gradients_are_refused_by(source):
    """A physics-informed loss asks for the second derivative by the inputs: it is no constant."""
    x = vectors(1)[0][0].requires_grad_()
    pair = OwnLoop(mlp(), x)
    answer = pair.step(x)
    tangent = torch.ones_like(answer).requires_grad_()
    (gradient,) = torch.autograd.grad(answer, x, tangent, create_graph=True)
    wanted = {"input": x, "weight": pair.model[0].weight, "tangent": tangent}[source]
    with pytest.raises(BackwardError, match="gradients of gradients"):
        torch.autograd.grad(gradient.sum(), wanted, allow_unused=True)
    del gradient, answer
    assert not pair.step.stats.is_busy


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_that_might_be_differentiated_and_is_not():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for batch in vectors(3):
        for loss in pair.losses(batch):
            loss.backward(create_graph=True)
        pair.compare_gradients()
        pair.change(lambda model: model.zero_grad())


@pytest.mark.parametrize("kind", ["parameter", "input", "output"])
def test_a_tensor_that_backward_needs_was_changed(kind):
    """As in eager; the buffer is free again."""
    pair = OwnLoop(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), vectors(1)[0][0].requires_grad_())
    x = vectors(1)[0][0].requires_grad_()
    answer = pair.step(x)
    changed = {"parameter": pair.model[0].weight, "input": x, "output": answer}[kind]
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        answer.sum().backward()
    del answer
    assert not pair.step.stats.is_busy


def test_an_output_may_be_changed_if_backward_does_not_need_it():
    pair = OwnLoop(mlp(), vectors(1)[0][0])
    for x, y in vectors(3):
        for called, _, _ in pair.sides():
            F.cross_entropy(called(x).mul_(2).relu_(), y).backward()
        pair.compare_gradients()


def test_errors_of_a_backward_are_the_packages_and_runtime_errors():
    assert issubclass(BackwardError, OllaError)
    assert issubclass(BackwardError, RuntimeError)


def test_a_buffer_that_was_updated_again_before_backward():
    def averaging(self, x):
        self.average.mul_(0.5).add_(x.detach().mean(0))
        return self.first(x) * self.average

    step = OwnLoop(two_layers(averaging, average=torch.ones(6)), torch.ones(4, 6)).step
    first, second = step(torch.randn(4, 6)), step(torch.randn(4, 6))
    second.sum().backward()
    with pytest.raises(RuntimeError, match="changed in place"):
        first.sum().backward()
    assert not step.stats.is_busy
