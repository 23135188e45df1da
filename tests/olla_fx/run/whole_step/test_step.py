"""A whole training step changes what an eager step changes, and nothing else."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from olla_fx import StepInputError, StepModeError, UnsupportedOptimizerError
from tests.olla_fx.harness import WholeStep, assert_same, assert_served, bits, stats
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors

MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)


def picture(model, optimizer):
    """Everything that planning must leave alone, by value and by identity."""
    return {
        "values": {name: bits(each).clone() for name, each in model.state_dict().items()},
        "objects": {
            name: (id(each), each.requires_grad, each._version) for name, each in model.named_parameters()
        },
        "buffers": {name: (id(each), each._version) for name, each in model.named_buffers()},
        "grads": {
            name: each.grad if each.grad is None else id(each.grad) for name, each in model.named_parameters()
        },
        "modules": {name: dict(module.__dict__) for name, module in model.named_modules()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "groups": [(id(group), [id(each) for each in group["params"]]) for group in optimizer.param_groups],
        "group keys": [{**group, "params": None} for group in optimizer.param_groups],
        "state": {
            id(key): {name: id(each) for name, each in value.items()}
            for key, value in optimizer.state.items()
        },
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same_pictures(before, after):
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=0) if name in (
            "values", "random", "optimizer",
        ) else None  # fmt: skip
        if name not in ("values", "random", "optimizer"):
            assert before[name] == after[name], name


@pytest.mark.parametrize("shape", [(), (8, 8)], ids=["a class", "a class for each pixel"])
def test_losses_outlive_later_steps(shape):
    """The kernel of either loss asks for two blocks of 4 B, in another order; one is the caller's."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5))
    if not shape:
        model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    x, y = torch.randn(2, 3, 8, 8), torch.randint(5, (2, *shape))
    step = olla_fx.optimize(
        model, (x, y), loss_fn=F.cross_entropy, optimizer=MOMENTUM(model.parameters()), solver="none"
    )
    losses, values = [], []
    for calls in range(1, 4):
        losses.append(step(x, y))
        values.append(losses[-1].item())
        step.poison()
        assert [loss.item() for loss in losses] == values
        assert_served(step, calls, 1)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("what", ["optimize", "plan"])
@pytest.mark.parametrize("make", [MOMENTUM, optim.AdamW])
def test_planning_leaves_everything_alone(make, what, with_state):
    model = SmallNet()
    optimizer = make(model.parameters())
    x, y = images(1)[0]
    F.cross_entropy(model(x), y).backward()
    if with_state:
        optimizer.step()
    before = picture(model, optimizer)
    inputs = bits(x).clone()
    getattr(olla_fx, what)(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    assert_same_pictures(before, picture(model, optimizer))
    assert torch.equal(inputs, bits(x))


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
    assert all(one is other for one, other in zip(step.parameters(), model.parameters(), strict=True))
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
    step = olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    assert not seen
    for x, y in vectors(3):
        step(x, y)
    assert seen == [optimizer] * 3


def test_optimizer_pre_hooks_are_refused():
    model = mlp()
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedOptimizerError, match="pre-hooks"):
        olla_fx.optimize(model, vectors(1)[0], loss_fn=F.cross_entropy, optimizer=optimizer)


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
    assert_served(pair.step, 9, 1)


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
    for calls, (x, y) in enumerate(vectors(20), 1):
        with pytest.raises(IndexError, match="out of bounds"):
            pair.step(x, bad)
        pair.train((x, y))
        pair.compare()
        assert calls == 1 or stats(pair.step).binding == "buffer"
    with pytest.raises(IndexError):
        pair.step(x, bad)
    pair.run(vectors(3))


def dampened(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)


def test_a_refused_first_call_leaves_no_optimizer_state():
    pair = WholeStep(mlp(), dampened, vectors(1)[0])
    weight = pair.model[0].weight
    with torch.no_grad():
        overlapping = weight.detach().view(-1)[:24].view(4, 6)
    with pytest.raises(StepInputError, match="shares its storage"):
        pair.step(overlapping, vectors(1)[0][1])
    assert not pair.optimizers[1].state
    pair.run(vectors(3))


def test_a_first_run_that_raises_leaves_its_state_new():
    """Dampening acts from the second step on that succeeds."""
    pair = WholeStep(mlp(), dampened, vectors(1)[0])
    executor = pair.step._current.step.executor
    start = executor.start

    def broken(lease):
        lease.close() if hasattr(lease, "close") else None
        raise RuntimeError("interrupted")

    executor.start = broken
    with pytest.raises(RuntimeError, match="interrupted"):
        pair.step(*vectors(1)[0])
    executor.start = start
    pair.run(vectors(3))


def test_created_state_can_be_taken_back():
    pair = WholeStep(mlp(), dampened, vectors(1)[0])
    lookup = pair.step._current.lookup
    lookup.gather(lookup.check_inputs(vectors(1)[0]))
    assert len(pair.optimizers[1].state) == 4
    lookup.undo_created_state()
    assert not pair.optimizers[1].state
    pair.run(vectors(3))


def test_a_training_call_in_eval_mode():
    model = SmallNet()
    example = (torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
    optimizer = sgd(model.parameters())
    step = olla_fx.optimize(model, example, loss_fn=F.cross_entropy, optimizer=optimizer, solver="none")
    before = copy.deepcopy(model.state_dict())
    model.eval()
    with pytest.raises(StepModeError, match=r"model\.train\(\)"):
        step(*example)
    assert_same(before, model.state_dict(), "model")
