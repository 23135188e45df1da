"""A step finds its tensors by name at every call, and is planned again if the model changes."""

import copy
import logging
import operator
from functools import partial

import pytest
import torch
from torch import nn, optim

from olla_fx import UnsupportedOptimizerError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import MOMENTUM, SmallNet, dampened, images, mlp, sgd, vectors


def change_both(pair, change):
    """Call ``change(model, optimizer)`` for the eager and the planned half."""
    for _, model, optimizer in pair.sides():
        change(model, optimizer)


def test_load_state_dict():
    pair = WholeStep(SmallNet(), MOMENTUM, images(1)[0])
    other = {name: value + 1 for name, value in SmallNet().state_dict().items()}
    pair.run(images(2))
    change_both(pair, lambda model, _: model.load_state_dict(other))
    pair.run(images(2))
    assert pair.step.stats.replans == 0


def assigned(model):
    """Give a model new parameters of twice the old ones' values."""
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


def with_own_parameters(model, optimizer):
    """Let an optimizer hold a model's present parameters, with the state of the old ones."""
    for before, after in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True):
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def test_load_state_dict_by_assignment_leaves_the_optimizer_behind():
    """Eager's optimizer goes on with the old parameters; the step refuses, and changes nothing."""
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0]).run(vectors(2))
    pair.change(assigned)
    optimizer = pair.optimizers[1]
    held, state = list(optimizer.param_groups[0]["params"]), dict(optimizer.state)
    values = copy.deepcopy(pair.model.state_dict())
    for _ in range(2):
        with pytest.raises(UnsupportedOptimizerError, match=r"0\.weight, 0\.bias and 2 more\..*assign=False"):
            pair.step(*vectors(1)[0])
    assert all(map(operator.is_, held, optimizer.param_groups[0]["params"]))
    assert all(optimizer.state[parameter] is state[parameter] for parameter in held)
    assert_same(values, pair.model.state_dict(), "weights")
    change_both(pair, with_own_parameters)
    pair.run(vectors(3))
    assert pair.step.stats.replans == 0


def test_a_loop_of_ones_own_reads_assigned_parameters():
    """As in eager: the model computes with the new ones, and the optimizer goes on with the old."""
    pair = OwnLoop(mlp(), vectors(1)[0][0], MOMENTUM).run(vectors(2))
    pair.change(assigned)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 0


def test_load_state_dict_by_assignment_ends_a_tie():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    pair = WholeStep(model, sgd, vectors(1)[0]).run(vectors(1))
    pair.change(assigned)
    assert model[2].weight is not model[0].weight
    change_both(pair, lambda model, made: made.param_groups[0].update(params=list(model.parameters())))
    pair.run(vectors(2))
    assert pair.step.stats.replans == 1


@pytest.mark.parametrize("through", ["model", "step"])
def test_to_another_type_plans_again(through):
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    pair.run(vectors(2))
    pair.eager.to(torch.float64)
    (pair.model if through == "model" else pair.step).to(torch.float64)
    for optimizer in pair.optimizers:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].double()
    pair.run([(x.double(), y) for x, y in vectors(3)])
    assert pair.step.stats.replans == 1
    assert pair.model[0].weight.dtype == torch.float64


@pytest.mark.parametrize("make", [MOMENTUM, optim.AdamW])
def test_optimizer_load_state_dict(make):
    pair = WholeStep(mlp(), make, vectors(1)[0])
    pair.run(vectors(2))
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    pair.run(vectors(3))
    for optimizer, state in zip(pair.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    pair.run(vectors(3))
    assert pair.step.stats.replans == 0


def test_optimizer_state_that_is_emptied_is_made_again():
    pair = WholeStep(mlp(), partial(MOMENTUM, dampening=0.5), vectors(1)[0])
    pair.run(vectors(2))
    change_both(pair, lambda _, optimizer: optimizer.state.clear())
    pair.run(vectors(3))
    assert pair.step.stats.replans == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model.conv.requires_grad_(False),
        lambda model, _: model.norm.eval(),
        lambda model, _: model.drop.eval(),
        lambda model, _: model.frozen.requires_grad_(True),
        lambda _, optimizer: optimizer.param_groups[0]["params"].pop(2),
    ],
    ids=["freeze", "norm eval", "dropout eval", "unfreeze", "fewer parameters"],
)
def test_changes_of_the_model_plan_again(change):
    pair = WholeStep(SmallNet(), MOMENTUM, images(1)[0])
    pair.run(images(2))
    change_both(pair, change)
    pair.run(images(3))
    assert pair.step.stats.replans == 1


def test_a_replaced_layer_plans_again():
    """The optimizer must be told, as in eager; one that still holds the old layer is refused."""
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    pair.run(vectors(2))
    change_both(pair, lambda model, _: model.__setitem__(2, copy.deepcopy(model[2])))
    change_both(
        pair, lambda model, optimizer: optimizer.param_groups[0].update(params=list(model.parameters()))
    )
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1


def test_adding_a_parameter_group_plans_again():
    pair = WholeStep(mlp(), lambda parameters: MOMENTUM(list(parameters)[2:]), vectors(1)[0])
    pair.run(vectors(2))
    change_both(
        pair,
        lambda model, optimizer: optimizer.add_param_group(
            {"params": list(model[0].parameters()), "lr": 0.5}
        ),
    )
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1


def test_layers_are_frozen_and_unfrozen_between_epochs():
    pair = WholeStep(SmallNet(), MOMENTUM, images(1)[0]).run(images(8))
    for is_trained in (False, True):
        pair.change(lambda model, is_trained=is_trained: model.conv.requires_grad_(is_trained))
        pair.change(lambda model: model.conv.zero_grad())
        pair.run(images(8))
    assert pair.step.stats.replans == 1  # unfrozen, the first plan fits again


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.free = nn.Linear(6, 6, bias=False)
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.mask is not None:
            x = x * self.mask
        if hasattr(self, "shift"):
            x = x + self.shift
        return self.body(self.free(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "mask", torch.arange(6.0)),
        lambda model: model.register_buffer("shift", torch.arange(6.0)),
        lambda model: setattr(model.free, "bias", nn.Parameter(torch.ones(6), requires_grad=False)),
        lambda model: setattr(model.free, "bias", nn.Parameter(torch.ones(6))),
    ],
    ids=["none", "absent", "frozen bias", "bias"],
)
def test_a_tensor_that_appears_plans_again(change):
    pair = WholeStep(Masked(), sgd, vectors(1)[0]).run(vectors(2))
    pair.change(change)
    pair.run(vectors(2))
    assert pair.step.stats.replans == 1


def test_the_choice_of_attention_and_determinism_plan_again():
    step = check_inference(mlp(), [(x,) for x, _ in vectors(1)], 1)
    x = vectors(1)[0][0]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        step(x)
    assert step.stats.replans == 1
    step(x)
    assert step.stats.replans == 1  # as it was at first
    try:
        torch.use_deterministic_algorithms(True)
        step(x)
        assert step.stats.replans == 2
    finally:
        torch.use_deterministic_algorithms(False)


class ThreeLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def tie(model):
    model.b.weight = model.a.weight


@pytest.mark.parametrize("make", [sgd, dampened])
def test_weights_tied_after_planning_plan_again(make):
    """The optimizer must be told, since a step refuses one that holds what the model does not have."""
    pair = WholeStep(ThreeLayers(), make, vectors(1)[0]).run(vectors(2))
    pair.change(tie)
    with pytest.raises(UnsupportedOptimizerError, match=r"shape \[6, 6\] that is no parameter of the model"):
        pair.step(*vectors(1)[0])
    change_both(pair, lambda model, optimizer: drop_strangers(optimizer, model))
    pair.run(vectors(3))
    assert pair.step.stats.replans == 1


def drop_strangers(optimizer, model):
    own = set(model.parameters())
    held = optimizer.param_groups[0]["params"]
    for parameter in [parameter for parameter in held if parameter not in own]:
        optimizer.state.pop(parameter, None)
    optimizer.param_groups[0]["params"] = [parameter for parameter in held if parameter in own]


def test_weights_tied_after_planning_plan_inference_again():
    model, x = ThreeLayers().eval(), vectors(1)[0][0]
    step = check_inference(model, [(x,)], 1)
    tie(model)
    with torch.no_grad():
        assert torch.equal(step(x), model(x))
    assert step.stats.replans == 1


class TiedModules(ThreeLayers):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.b = self.a


def test_tied_modules_may_be_tied_another_way():
    model, x = TiedModules().eval(), vectors(1)[0][0]
    step = check_inference(model, [(x,)], 1)
    model.b = model.c
    with torch.no_grad():
        assert torch.equal(step(x), model(x))
    assert step.stats.replans == 1


def test_planning_again_is_logged(caplog):
    pair = WholeStep(mlp(), sgd, vectors(1)[0])
    pair.run(vectors(1))
    pair.change(lambda model: model[0].bias.requires_grad_(False))
    with caplog.at_level(logging.INFO, logger="olla_fx"):
        pair.run(vectors(2))
    assert "0.bias was frozen or unfrozen" in caplog.text
