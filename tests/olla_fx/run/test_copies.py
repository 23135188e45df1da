"""Copies, pickles and checkpoints of planned modules train on by themselves."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from tests.olla_fx.harness import WholeStep, assert_same, assert_same_models, stats
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd, vectors

ADAMW = partial(optim.AdamW, lr=0.05)


def copied(step):
    return copy.deepcopy(step)


def pickled(step):
    return pickle.loads(pickle.dumps(step))


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_trains_on_by_itself(remake):
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    other = remake(pair.step)
    before = copy.deepcopy(pair.model)
    reference = copy.deepcopy((pair.eager, pair.optimizers[0]))
    for index, (x, y) in enumerate(images(20)):
        other.poison()
        torch.manual_seed(index)
        reference[1].zero_grad()
        loss = F.cross_entropy(reference[0](x), y)
        loss.backward()
        reference[1].step()
        torch.manual_seed(index)
        assert_same(loss.detach(), other(x, y), "loss of the copy")
    assert_same_models(before, pair.model)
    assert stats(other).binding == "buffer"
    assert stats(other).counts.served > 0
    assert stats(other).counts.outside == 0
    assert_same(dict(reference[0].state_dict()), dict(other.state_dict()), "weights of the copy")
    pair.run(images(2))


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_of_an_own_loop_and_of_an_inference(remake):
    x, y = vectors(1)[0]
    model = mlp()
    module = olla_fx.optimize(model, x)
    F.cross_entropy(module(x), y).backward()
    other = remake(module)
    eager = copy.deepcopy(model)
    optimizers = [sgd(each.parameters()) for each in (eager, other)]
    for batch, target in vectors(20):
        other.poison()
        for each, optimizer in zip((eager, other), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(each(batch), target).backward()
            optimizer.step()
    assert_same(dict(eager.state_dict()), dict(other.state_dict()), "weights of the copy")
    assert stats(other).binding == "buffer"
    assert stats(other).counts.served > 0
    assert stats(other).counts.outside == 0
    assert other.state_dict().keys() == module.state_dict().keys()
    mine, theirs = ([each.data_ptr() for each in one.parameters()] for one in (module, other))
    assert not set(mine) & set(theirs)
    fast = olla_fx.optimize(mlp().eval(), x)
    assert_same(fast(x), remake(fast)(x), "inference")


def test_a_planned_module_within_a_copied_model():
    inner = olla_fx.optimize(mlp(), vectors(1)[0][0])
    outer = copy.deepcopy(nn.Sequential(inner, nn.Linear(3, 3)))
    x, y = vectors(1)[0]
    F.cross_entropy(outer(x), y).backward()
    assert all(each.grad is not None for each in outer.parameters())
    assert inner._model[0].weight.grad is None


def test_checkpoints_in_the_middle_of_training(tmp_path):
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    states = {"model": pair.step.state_dict(), "optimizer": pair.optimizers[1].state_dict()}
    torch.save(states, tmp_path / "c")
    pair.run(images(2))
    saved = torch.load(tmp_path / "c")
    later = WholeStep(SmallNet(), ADAMW, images(1)[0])
    for model, optimizer in zip((later.eager, later.step), later.optimizers, strict=True):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    later.run(images(20))


def test_an_average_of_the_weights():
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0])
    averages = [
        optim.swa_utils.AveragedModel(each, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for each in (pair.eager, pair.model)
    ]
    for batch in images(20):
        pair.train(batch)
        for average, model in zip(averages, (pair.eager, pair.model), strict=True):
            average.update_parameters(model)
    assert_same_models(*averages)


def heard(module, inputs, output):
    module.heard = [*getattr(module, "heard", []), float(output.detach().sum())]


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_keeps_hooks_and_attributes_of_the_planned_module(remake):
    x = vectors(1)[0][0]
    module = olla_fx.optimize(mlp(), x)
    module.register_forward_hook(heard)
    module.note = {"epoch": 3}
    other = remake(module)
    assert other.note == module.note
    assert other.note is not module.note
    for _ in range(3):
        answer = other(x)
    assert other.heard == [float(answer.detach().sum())] * 3
    assert not hasattr(module, "heard")
    assert_same(module(x).detach(), answer.detach(), "answer")


def test_a_loss_without_a_name_cannot_be_pickled():
    model, (x, y) = mlp(), vectors(1)[0]
    step = olla_fx.optimize(
        model, (x, y), loss_fn=lambda *each: F.cross_entropy(*each), optimizer=sgd(model.parameters())
    )
    with pytest.raises(olla_fx.OllaError, match=r"lambda> cannot be pickled.*with def"):
        pickle.dumps(step)
