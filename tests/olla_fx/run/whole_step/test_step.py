"""A whole training step changes what an eager step changes, and nothing else."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx import StepInputError, StepModeError, UnsupportedOptimizerError
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import WholeStep, assert_served, assert_served_if_settled
from tests.olla_fx.helpers import MOMENTUM, SmallNet, dampened, images, mlp, sgd, vectors


def values_of(model, optimizer):
    """Return all values that planning must leave alone."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))


def objects_of(model, optimizer):
    """Return the identity and version of all objects that planning must leave alone."""
    parameters, groups = dict(model.named_parameters()), optimizer.param_groups
    return {
        "parameters": {name: (id(p), p.requires_grad, p._version) for name, p in parameters.items()},
        "buffers": {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()},
        "gradients": {name: id(parameter.grad) for name, parameter in parameters.items()},
        "modules": {name: dict(module.__dict__) for name, module in model.named_modules()},
        "groups": [(id(group), [id(parameter) for parameter in group["params"]]) for group in groups],
        "options": [{**group, "params": None} for group in groups],
        "state": {
            id(parameter): {key: id(value) for key, value in state.items()}
            for parameter, state in optimizer.state.items()
        },
        "gradient mode": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize("shape", [(), (8, 8)], ids=["a class", "a class for each pixel"])
def test_losses_outlive_later_steps(shape):
    """The kernel of either loss asks for two blocks of 4 B, in another order; one is the caller's."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5))
    if not shape:
        model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    x, y = torch.randn(2, 3, 8, 8), torch.randint(5, (2, *shape))
    step = olla_fx.optimize(
        model,
        (x, y),
        loss_fn=F.cross_entropy,
        optimizer=MOMENTUM(model.parameters()),
        solver="none",
        fallback="raise",
    )
    losses, values = [], []
    for _ in range(3):
        losses.append(step(x, y))
        values.append(losses[-1].item())
        step.poison()
        assert [loss.item() for loss in losses] == values
        assert_served_if_settled(step, 1)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("function", [olla_fx.optimize, olla_fx.plan])
@pytest.mark.parametrize("make", [MOMENTUM, optim.AdamW])
def test_planning_leaves_everything_alone(make, function, with_state):
    model = SmallNet()
    optimizer = make(model.parameters())
    x, y = images(1)[0]
    F.cross_entropy(model(x), y).backward()
    if with_state:
        optimizer.step()
    values, objects, inputs = values_of(model, optimizer), objects_of(model, optimizer), x.clone()
    function(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    assert_same(values, values_of(model, optimizer), "values")
    assert objects == objects_of(model, optimizer)
    assert_same(inputs, x, "inputs")


def test_the_first_call_is_a_real_step():
    pair = WholeStep(SmallNet(), optim.AdamW, images(1)[0])
    pair.compare()
    assert not pair.optimizers[1].state
    pair.run(images(1))
    assert pair.optimizers[1].state[pair.model.head.weight]["step"] == 1


def test_gradients_are_as_before():
    pair = WholeStep(SmallNet(), MOMENTUM, images(1)[0])
    kept = torch.full_like(pair.model.head.weight, 3.0)
    pair.model.head.weight.grad = kept
    pair.run(images(3))
    assert pair.model.head.weight.grad is kept
    assert torch.equal(kept, torch.full_like(kept, 3.0))
    assert pair.model.conv.weight.grad is None


def test_the_loss_is_the_callers():
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    x, y = vectors(1)[0]
    losses = [pair.step(x, y) for _ in range(4)]
    values = [float(loss) for loss in losses]
    pair.step.poison()
    pair.step(x, y)
    assert [float(loss) for loss in losses] == values
    assert len({loss.data_ptr() for loss in losses}) == 4
    assert not losses[0].requires_grad


def test_shares_parameters_and_state_dict_with_the_model():
    pair = WholeStep(SmallNet(), MOMENTUM, images(1)[0])
    step, model = pair.step, pair.model
    assert isinstance(step, nn.Module)
    assert list(step.state_dict()) == list(model.state_dict())
    assert all(map(operator.is_, step.parameters(), model.parameters()))
    assert dict(step.named_buffers()).keys() == dict(model.named_buffers()).keys()
    step.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
    assert not model.head.weight.any()


def test_train_and_eval_reach_the_model():
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    pair.step.eval()
    assert not pair.model.training
    with pytest.raises(StepModeError, match=r"model\.train\(\)"):
        pair.step(*vectors(1)[0])
    pair.step.train()
    pair.run(vectors(2))


def test_optimizer_post_hooks_run():
    model = mlp()
    optimizer = sgd(model.parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *arguments: seen.append(arguments[0]))
    step = olla_fx.optimize(
        model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer, solver="none", fallback="raise"
    )
    assert not seen
    for x, y in vectors(3):
        step(x, y)
    assert seen == [optimizer] * 3


def test_optimizer_pre_hooks_are_refused():
    model = mlp()
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedOptimizerError, match="pre-hooks"):
        olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer, fallback="raise")


def test_a_step_under_ambient_autocast_equals_eager():
    pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    kinds = [True] * 9 + [False] * 3 + [True] * 9
    for autocast, (x, y) in zip(kinds, vectors(21), strict=True):
        pair.step.poison()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            pair.optimizers[0].zero_grad()
            loss = F.cross_entropy(pair.eager(x), y)
            given = pair.step(x, y)
        loss.backward()
        pair.optimizers[0].step()
        assert_same(loss.detach(), given, "loss")
    pair.compare()
    assert_served(pair.step, 1)


def test_planning_and_calling_under_no_grad():
    with torch.no_grad():
        pair = WholeStep(mlp(), MOMENTUM, vectors(1)[0])
    for x, y in vectors(3):
        expected = pair.train_eager((x, y))
        with torch.no_grad():
            assert_same(expected, pair.step(x, y), "loss")
    pair.compare()


def test_an_exception_in_a_step_leaves_it_usable():
    """A class out of range stops the step in its loss, before any update."""
    pair = WholeStep(mlp(), sgd, vectors(1)[0])
    bad = torch.tensor([0, 1, 99, 0])
    for x, y in vectors(20):
        with pytest.raises(IndexError, match="out of bounds"):
            pair.step(x, bad)
        pair.train((x, y))
        pair.compare()
    with pytest.raises(IndexError):
        pair.step(x, bad)
    pair.run(vectors(3))


def test_a_refused_first_call_leaves_no_optimizer_state():
    pair = WholeStep(mlp(), dampened, vectors(1)[0])
    weight = pair.model[0].weight
    with torch.no_grad():
        overlapping = weight.detach().view(-1)[:24].view(4, 6)
    with pytest.raises(StepInputError, match="shares its storage"):
        pair.step(overlapping, vectors(1)[0][1])
    assert not pair.optimizers[1].state
    pair.run(vectors(3))


def test_a_first_run_that_raises_leaves_no_optimizer_state():
    """Dampening acts from the second step on that succeeds."""
    pair = WholeStep(mlp(), dampened, vectors(1)[0])
    x, _ = vectors(1)[0]
    with pytest.raises(IndexError, match="out of bounds"):
        pair.step(x, torch.tensor([0, 1, 99, 0]))
    assert not pair.optimizers[1].state
    pair.run(vectors(3))


def test_a_training_call_in_eval_mode():
    model = SmallNet()
    example = (torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    optimizer = sgd(model.parameters())
    step = olla_fx.optimize(
        model, example, loss_fn=F.cross_entropy, optimizer=optimizer, solver="none", fallback="raise"
    )
    before = copy.deepcopy(model.state_dict())
    model.eval()
    with pytest.raises(StepModeError, match=r"model\.train\(\)"):
        step(*example)
    assert_same(before, model.state_dict(), "model")
