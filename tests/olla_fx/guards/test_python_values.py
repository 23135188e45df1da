"""Python values that a step baked: later changes are noticed, and what cannot be kept is refused."""

import copy
from functools import partial
from types import MethodType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx import CaptureError, UnsupportedOptimizerError
from tests.olla_fx.harness import WholeStep, assert_served, check_inference
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors


class Odd(nn.Module):
    """Reads Python values of every kind."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.scale = 2.0
        self.activation = torch.tanh
        self.factors = [torch.ones(3), torch.full((3,), 2.0)]
        self.options = {"shift": [0.5, 1]}
        self.table = np.ones(3, dtype=np.float32)
        self.unread = 0

    def forward(self, x):
        hidden = self.activation(self.body(x)) * self.scale + self.options["shift"][0]
        return hidden * self.factors[0] * self.factors[1] * float(self.table[0])


def set_momentum(model):
    model.norm.momentum = 0.5


def set_rate(model):
    model.drop.p = 0.6


def set_slope(model):
    model.act.inplace = False


@pytest.mark.parametrize("what", [set_momentum, set_rate, set_slope])
def test_a_changed_attribute_of_a_library_module_plans_again(what):
    pair = WholeStep(SmallNet(), sgd, images(1)[0]).run(images(2))
    pair.change(what)
    pair.run(images(3))
    assert pair.step.stats.replans == 1


def replace_factor(model):
    model.factors[1] = torch.full((3,), 5.0)


@pytest.mark.parametrize(
    "what",
    [
        lambda model: setattr(model, "scale", 3.0),
        lambda model: setattr(model, "activation", torch.sigmoid),
        lambda model: model.options["shift"].__setitem__(0, 0.25),
        lambda model: model.table.__setitem__(0, 4),
        lambda model: setattr(model, "forward", MethodType(lambda self, x: self.body(x) * 3, model)),
        replace_factor,
    ],
    ids=["number", "function", "nested", "array", "forward", "tensor"],
)
def test_a_changed_attribute_plans_again(what):
    pair = WholeStep(Odd(), sgd, vectors(1)[0]).run(vectors(2))
    pair.change(what)
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1


def test_a_tensor_in_a_list_is_read_at_every_call():
    pair = WholeStep(Odd(), sgd, vectors(1)[0]).run(vectors(2))
    pair.change(lambda model: model.factors[0].mul_(3))
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0


def test_what_the_step_does_not_read_may_change():
    """A training loop's counters on the model cost no new plan."""
    pair = WholeStep(Odd(), sgd, vectors(1)[0])
    for batch in vectors(4):
        pair.model.unread += 1
        pair.model.new = pair.model.unread
        pair.train(batch)
    pair.compare()
    assert pair.step.stats.replans == 0


class WeightedLoss(nn.Module):
    """A buffer that is read, one that is updated, a number, and a module of its own."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
        self.register_buffer("average", torch.zeros(()))
        self.factor = 1.0

    def forward(self, answer, target):
        loss = self.criterion(answer, target) * self.factor
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss + self.average


class StepWithLosses(WholeStep):
    """A pair with a loss for each half."""

    def __init__(self, loss, model=None, make=sgd, of=None):
        self.losses = [copy.deepcopy(loss), loss]
        super().__init__(model or mlp(), make, vectors(1)[0], of(loss) if of else loss)
        self.loss_fn = of(self.losses[0]) if of else self.losses[0]


class Holder:
    """No module, but it holds one."""

    def __init__(self, criterion):
        self.criterion = criterion

    def __call__(self, answer, target):
        return self.criterion(answer, target)

    def compute(self, answer, target):
        return self.criterion(answer, target)


@pytest.mark.parametrize(
    "of",
    [
        None,
        Holder,
        lambda loss: Holder(loss).compute,
        lambda loss: loss.forward,
        lambda loss: partial(loss),
    ],
    ids=["module", "object", "method", "forward", "partial"],
)
def test_a_loss_with_buffers(of):
    pair = StepWithLosses(WeightedLoss(), of=of).run(vectors(3))
    for eager, planned in zip(*(loss.buffers() for loss in pair.losses), strict=True):
        assert torch.equal(eager, planned)
    for loss in pair.losses:
        loss.criterion.weight = torch.tensor([3.0, 1.0, 1.0])
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0
    for loss in pair.losses:
        loss.factor, loss.criterion.label_smoothing = 2.0, 0.2
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1


def test_a_loss_with_a_trained_parameter():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))

        def forward(self, answer, target):
            return F.cross_entropy(answer / self.temperature, target)

    eager, planned = mlp(), None
    planned = copy.deepcopy(eager)
    losses = [Scaled(), Scaled()]
    optimizers = [
        optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
        for model, loss in zip((eager, planned), losses, strict=True)
    ]
    step = olla_fx.optimize(
        planned, vectors(1)[0], loss_fn=losses[1], optimizer=optimizers[1], fallback="raise"
    )
    for x, y in vectors(4):
        optimizers[0].zero_grad()
        loss = losses[0](eager(x), y)
        loss.backward()
        optimizers[0].step()
        step.poison()
        assert torch.equal(step(x, y), loss)
    assert_served(step)
    assert losses[1].temperature != 2
    assert torch.equal(losses[0].temperature, losses[1].temperature)


def test_a_loss_that_holds_the_model():
    class Decayed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, answer, target):
            return F.cross_entropy(answer, target) + sum(
                weight.square().sum() for weight in self.model.parameters()
            )

    model = mlp()
    pair = WholeStep(model, sgd, vectors(1)[0], Decayed(model))
    pair.loss_fn = Decayed(pair.eager)
    pair.run(vectors(3))


def test_numbers_that_a_loss_function_encloses():
    factor = 1.0

    def loss_fn(answer, target):
        return F.cross_entropy(answer, target) * factor

    pair = WholeStep(mlp(), sgd, vectors(1)[0], loss_fn).run(vectors(2))
    factor = 3.0
    pair.run(vectors(2))
    assert pair.step.stats.replans == 1


def test_a_criterion_that_a_loss_function_encloses():
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    pair = WholeStep(mlp(), sgd, vectors(1)[0], lambda answer, target: criterion(answer, target))
    pair.run(vectors(2))
    criterion.weight.mul_(2)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0
    criterion.weight = torch.tensor([3.0, 1.0, 1.0])
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1


def planned(model=None, loss_fn=F.cross_entropy):
    model = model or mlp()
    optimizer = sgd(model.parameters())
    step = olla_fx.optimize(model, vectors(1)[0], loss_fn=loss_fn, optimizer=optimizer, fallback="raise")
    step(*vectors(1)[0])
    return step, model, optimizer


def refused_call(step, said, kind=CaptureError):
    """The next call is refused and changes nothing, and so is the one after it."""
    before = copy.deepcopy(step.state_dict())
    for _ in range(2):
        with pytest.raises(kind, match=said):
            step(*vectors(1)[0])
    for name, value in step.state_dict().items():
        assert torch.equal(value, before[name])


def test_hooks_that_are_added_later_are_refused():
    step, model, optimizer = planned()
    handle = model[0].register_forward_hook(lambda *_: None)
    refused_call(step, "module '0' has the hook")
    handle.remove()
    handle = model[2].weight.register_hook(lambda gradient: gradient)
    refused_call(step, r"parameter '2.weight' has gradient hooks")
    handle.remove()
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    refused_call(step, r"parameter '2.weight' has gradient hooks")
    handle.remove()
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    refused_call(step, "pre-hooks", UnsupportedOptimizerError)
    handle.remove()
    step(*vectors(1)[0])


def test_a_function_that_reaches_the_models_weights_is_refused():
    model = mlp()
    with pytest.raises(CaptureError, match=r"0\.weight from .* closure.*nn\.Module that holds them"):
        planned(model, lambda answer, target: F.cross_entropy(answer, target) + model[0].weight.sum())


def test_a_loss_function_that_changes_what_it_encloses_is_refused():
    seen = []

    def loss_fn(answer, target):
        seen.append(1)
        return F.cross_entropy(answer, target)

    with pytest.raises(CaptureError, match="loss_fn: seen"):
        planned(loss_fn=loss_fn)


GAIN = 2.0
CALLS = [0]


def gain():
    return GAIN


class Amplifier(nn.Module):
    """Reads a global variable by way of a function."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x) * gain()


class Counting(Amplifier):
    """Changes a global variable."""

    def forward(self, x):
        CALLS[0] += 1
        return super().forward(x)


class Decorated(Amplifier):
    """Reads a global variable within the wrapper of a library's decorator."""

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.body(x) * GAIN


@pytest.mark.parametrize("kind", [Amplifier, type("Derived", (Amplifier,), {}), Decorated])
def test_a_changed_global_variable_of_a_forward_plans_again(kind, monkeypatch):
    pair = WholeStep(kind(), sgd, vectors(1)[0]).run(vectors(2))
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1


def test_other_global_variables_may_change(monkeypatch):
    """A script's variables have the names of attributes, such as ``body``."""
    monkeypatch.setitem(globals(), "body", 1)
    pair = WholeStep(Amplifier(), sgd, vectors(1)[0]).run(vectors(2))
    monkeypatch.setitem(globals(), "body", 2)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0


def test_a_forward_that_changes_a_global_variable_is_refused():
    with pytest.raises(CaptureError, match=r"Counting\.forward: CALLS"):
        planned(Counting())


@torch.library.custom_op("olla_fx_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
relu = torch.ops.aten.relu


class Operators(nn.Module):
    """Reads operators from global variables, which keep caches of their own."""

    def forward(self, x):
        return relu(doubled(x))


def test_operators_in_global_variables_change_nothing():
    step = check_inference(Operators(), [(torch.randn(4),)] * 3, outputs=1)
    assert step.stats.replans == 0
