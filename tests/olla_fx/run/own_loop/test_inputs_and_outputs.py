"""Inputs and outputs of all kinds in the caller's own loop."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx import StepInputError
from tests.olla_fx.harness import assert_same, assert_same_models, is_busy
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors


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
        answers = [module(x, y) for module in (pair.eager, pair.step)]
        assert_same(
            *[torch.utils._pytree.tree_map_only(torch.Tensor, torch.detach, each) for each in answers],
            "outputs",
        )
        assert not answers[1]["b"][1].requires_grad
        assert answers[1]["same"] is x
        for answer in answers:
            (answer["a"].sum() if attempt % 2 else answer["a"].sum() + answer["b"][0].prod()).backward()
        pair.compare_gradients()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
    pair.assert_served()


def test_inputs_that_want_a_gradient():
    pair = OwnLoop(SmallNet(), images(1)[0][0].requires_grad_())
    for image, target in images(20):
        pair.step.poison()
        inputs = [image.clone().requires_grad_() for _ in range(2)]
        losses = []
        for module, one in zip((pair.eager, pair.step), inputs, strict=True):
            torch.manual_seed(0)
            losses.append(F.cross_entropy(module(one * 2), target))
        for loss in losses:
            loss.backward()
        assert_same(inputs[0].grad, inputs[1].grad, "input gradient")
        pair.compare_gradients()
    pair.assert_served()


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


def both(function, use, steps=3, context=nullcontext, **parts):
    """Use a model and its planned twin in the same way; compare all gradients."""
    torch.manual_seed(0)
    model = Written(function, **parts)
    pair = OwnLoop(model, torch.randn(4, 6))
    for step in range(steps):
        x = torch.randn(4, 6)
        for module, own in ((pair.eager, pair.eager), (pair.step, pair.model)):
            torch.manual_seed(step)
            with context():
                answer = module(x)
            use(answer, own)
        pair.compare_gradients()
    assert not is_busy(pair.step)
    return pair


def test_gradients_that_are_one_tensor_are_separated():
    def shared(self, x):
        return F.linear(x, self.a + self.b)

    parts = {name: nn.Parameter(torch.randn(6, 6)) for name in "ab"}
    pair = both(shared, lambda answer, _: answer.square().sum().backward(), **parts)
    pair.model.a.grad.zero_()
    assert pair.model.b.grad.abs().sum() > 0


def test_tensors_that_want_a_gradient_and_are_no_parameters():
    def scaled(self, x):
        return self.l(x) * self.scale

    pair = both(scaled, lambda answer, _: answer.sum().backward(), scale=torch.ones(6, requires_grad=True))
    assert_same(pair.eager.scale.grad, pair.model.scale.grad, "gradient of an attribute")


def use_both(answer, _):
    first, second = answer
    first.mul_(2)
    (second.square().sum() + first.sum()).backward()


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: (lambda h: (h, h.view(-1)))(self.l(x)),
        lambda self, x: (lambda h: (h, h))(self.l(x)),
        lambda self, x: (lambda h: (h[:2], h))(self.l(x)),
        lambda self, x: (lambda h: (h, h.t()[1:3]))(self.l(x)),
    ],
    ids=["view", "same", "part first", "transposed part"],
)
def test_outputs_in_one_storage_that_are_changed_in_place(function):
    both(function, use_both)


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
    pair = OwnLoop(Written(lambda self, z: (self.l(z * 2), z, z[1:])), torch.ones(4, 6, requires_grad=True))
    for _ in range(3):
        start = torch.randn(4, 6)
        gradients = []
        for module in (pair.eager, pair.step):
            leaf = start.clone().requires_grad_()
            y = leaf * 1.5
            a, b, c = module(y)
            assert b is y
            c.mul_(3)
            (a.sum() + b.square().sum()).backward()
            gradients.append(leaf.grad)
        assert_same(*gradients, "gradient of the input")
        pair.compare_gradients()


def test_no_gradient_from_outputs_that_nobody_used():
    pair = both(lambda self, x: (self.l(x), self.k(x)), lambda answer, _: answer[0].sum().backward())
    assert pair.model.k.weight.grad is None
    first, _ = pair.step(torch.randn(4, 6))
    found = torch.autograd.grad(first.sum(), [pair.model.l.weight, pair.model.k.weight], allow_unused=True)
    assert found[0] is not None
    assert found[1] is None


def test_inputs_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x, scale=1.0, shift=None):
            hidden = self.body(x) * scale
            return hidden if shift is None else hidden + shift

    planned = olla_fx.optimize(Named(), torch.ones(4, 6), solver="none")
    model = planned._model
    x, shift = torch.randn(4, 6), torch.randn(3)
    for named in ({"x": x}, {"x": x, "scale": 2.0}, {"shift": shift, "x": x}):
        assert_same(model(**named).detach(), planned(**named).detach(), str(named))
    assert_same(model(x, scale=0.5).detach(), planned(x, scale=0.5).detach(), "mixed")
    with pytest.raises(StepInputError, match="unexpected keyword"):
        planned(x, size=3)


@pytest.mark.parametrize("leaf", [object(), torch.ones(2).to_sparse()])
def test_inputs_that_do_not_tell_calls_apart(leaf):
    planned = olla_fx.optimize(Written(lambda self, x, *_: self.l(x)), torch.ones(4, 6), solver="none")
    with pytest.raises(StepInputError, match="pass"):
        planned(torch.ones(4, 6), leaf)


def test_a_signed_zero_is_another_number():
    planned = olla_fx.optimize(
        Written(lambda self, x, c: torch.copysign(self.l(x), torch.full((6,), c))), (torch.ones(4, 6), 0.0)
    )
    positive, negative = (planned(torch.ones(4, 6), c).detach() for c in (0.0, -0.0))
    assert_same(positive, -negative, "sign")
