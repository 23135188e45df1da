"""Inputs and outputs of all kinds in the caller's own loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx import StepInputError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop
from tests.olla_fx.helpers import SmallNet, images, mlp, vectors
from tests.olla_fx.run.own_loop.written import train_written, two_layers


class Several(nn.Module):
    """Several inputs and outputs: one without a gradient, one that nobody may use, a number."""

    def __init__(self):
        super().__init__()
        self.body, self.other = mlp(), mlp()

    def forward(self, x, y):
        hidden = self.body(x)
        return {"a": hidden * y, "b": (self.other(x), hidden.argmax(1), 7), "same": x}


def test_outputs_of_all_kinds():
    pair = OwnLoop(Several(), (torch.ones(4, 6), torch.ones(4, 3)))
    for attempt in range(20):
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        pair.step.poison()
        answers = [called(x, y) for called, _, _ in pair.sides()]
        assert_same(*answers, "outputs")
        assert not answers[1]["b"][1].requires_grad
        assert answers[1]["same"] is x
        for answer in answers:
            (answer["a"].sum() if attempt % 2 else answer["a"].sum() + answer["b"][0].prod()).backward()
        pair.compare_gradients()
        pair.zero_grad()
    pair.assert_served()


def test_inputs_that_want_a_gradient():
    pair = OwnLoop(SmallNet(), images(1)[0][0].requires_grad_())
    for image, target in images(20):
        pair.step.poison()
        inputs = [image.clone().requires_grad_() for _ in range(2)]
        losses = []
        for (called, _, _), x in zip(pair.sides(), inputs, strict=True):
            torch.manual_seed(0)
            losses.append(F.cross_entropy(called(x * 2), target))
        for loss in losses:
            loss.backward()
        assert_same(inputs[0].grad, inputs[1].grad, "input gradient")
        pair.compare_gradients()
    pair.assert_served()


def test_gradients_that_are_one_tensor_are_separated():
    def shared(self, x):
        return F.linear(x, self.a + self.b)

    parts = {name: nn.Parameter(torch.randn(6, 6)) for name in "ab"}
    pair = train_written(shared, lambda answer, _: answer.square().sum().backward(), **parts)
    pair.model.a.grad.zero_()
    assert pair.model.b.grad.abs().sum() > 0


def test_tensors_that_want_a_gradient_and_are_no_parameters():
    def scaled(self, x):
        return self.first(x) * self.scale

    scale = torch.ones(6, requires_grad=True)
    pair = train_written(scaled, lambda answer, _: answer.sum().backward(), scale=scale)
    assert_same(pair.eager.scale.grad, pair.model.scale.grad, "gradient of an attribute")


def use_both(answer, _):
    first, second = answer
    first.mul_(2)
    (second.square().sum() + first.sum()).backward()


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: (lambda h: (h, h.view(-1)))(self.first(x)),
        lambda self, x: (lambda h: (h, h))(self.first(x)),
        lambda self, x: (lambda h: (h[:2], h))(self.first(x)),
        lambda self, x: (lambda h: (h, h.t()[1:3]))(self.first(x)),
    ],
    ids=["view", "same", "part first", "transposed part"],
)
def test_outputs_in_one_storage_that_are_changed_in_place(function):
    train_written(function, use_both)


class Centred(nn.Module):
    """Hands a parameter out for its loss, which nothing else in forward reads."""

    def __init__(self):
        super().__init__()
        self.body, self.centres = mlp(), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return {"answer": self.body(x), "centres": self.centres}


def test_an_output_that_is_a_parameter():
    def centre_loss(outputs, target):
        return (
            F.cross_entropy(outputs["answer"], target)
            + (outputs["answer"] - outputs["centres"][target]).square().mean()
        )

    pair = OwnLoop(Centred(), vectors(1)[0][0], loss_fn=centre_loss)
    pair.run(vectors(20))
    pair.assert_served()


def test_an_output_that_is_an_input():
    pair = OwnLoop(
        two_layers(lambda self, z: (self.first(z * 2), z, z[1:])), torch.ones(4, 6, requires_grad=True)
    )
    for _ in range(3):
        start = torch.randn(4, 6)
        gradients = []
        for called, _, _ in pair.sides():
            leaf = start.clone().requires_grad_()
            y = leaf * 1.5
            answer, same, part = called(y)
            assert same is y
            part.mul_(3)
            (answer.sum() + same.square().sum()).backward()
            gradients.append(leaf.grad)
        assert_same(*gradients, "gradient of the input")
        pair.compare_gradients()


def test_no_gradient_from_outputs_that_nobody_used():
    pair = train_written(
        lambda self, x: (self.first(x), self.second(x)), lambda answer, _: answer[0].sum().backward()
    )
    weights = pair.model.first.weight, pair.model.second.weight
    assert weights[1].grad is None
    answer, _ = pair.step(torch.randn(4, 6))
    gradients = torch.autograd.grad(answer.sum(), weights, allow_unused=True)
    assert [gradient is None for gradient in gradients] == [False, True]


def test_inputs_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x, scale=1.0, shift=None):
            hidden = self.body(x) * scale
            return hidden if shift is None else hidden + shift

    pair = OwnLoop(Named(), torch.ones(4, 6))
    x, shift = torch.randn(4, 6), torch.randn(3)
    for named in ({"x": x}, {"x": x, "scale": 2.0}, {"shift": shift, "x": x}):
        assert_same(pair.eager(**named), pair.step(**named), str(named))
    assert_same(pair.eager(x, scale=0.5), pair.step(x, scale=0.5), "mixed")
    with pytest.raises(StepInputError, match="unexpected keyword"):
        pair.step(x, size=3)


@pytest.mark.parametrize("leaf", [object(), torch.ones(2).to_sparse()])
def test_inputs_that_do_not_tell_calls_apart(leaf):
    pair = OwnLoop(two_layers(lambda self, x, *_: self.first(x)), torch.ones(4, 6))
    with pytest.raises(StepInputError, match="pass"):
        pair.step(torch.ones(4, 6), leaf)


def test_a_signed_zero_is_another_number():
    model = two_layers(lambda self, x, c: torch.copysign(self.first(x), torch.full((6,), c)))
    step = OwnLoop(model, (torch.ones(4, 6), 0.0)).step
    positive, negative = (step(torch.ones(4, 6), c) for c in (0.0, -0.0))
    assert_same(positive, -negative, "sign")
