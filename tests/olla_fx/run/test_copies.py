"""Copies, pickles and checkpoints of planned modules train on by themselves."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import olla_fx
from tests.olla_fx.comparisons import assert_same, assert_same_models
from tests.olla_fx.harness import OwnLoop, WholeStep, assert_served
from tests.olla_fx.helpers import ADAMW, SmallNet, images, mlp, sgd, vectors


def copied(step):
    return copy.deepcopy(step)


def pickled(step):
    return pickle.loads(pickle.dumps(step))


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_trains_on_by_itself(remake):
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    copied_step = remake(pair.step)
    model = copy.deepcopy(pair.model)
    eager, optimizer = copy.deepcopy((pair.eager, pair.optimizers[0]))
    for index, (x, y) in enumerate(images(20)):
        copied_step.poison()
        torch.manual_seed(index)
        optimizer.zero_grad()
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        optimizer.step()
        torch.manual_seed(index)
        assert_same(loss.detach(), copied_step(x, y), "loss of the copy")
    assert_same_models(model, pair.model)
    assert_served(copied_step)
    assert_same_models(eager, copied_step)
    pair.run(images(2))


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_of_an_own_loop_and_of_an_inference(remake):
    pair = OwnLoop(mlp(), vectors(1)[0][0]).run(vectors(1))
    original = pair.step
    pair.step = remake(original)
    pair.model, pair.optimizers[1] = pair.step, sgd(pair.step.parameters())
    pair.run(vectors(20))
    pair.assert_served()
    assert pair.step.state_dict().keys() == original.state_dict().keys()
    addresses = [{p.data_ptr() for p in step.parameters()} for step in (original, pair.step)]
    assert not set.intersection(*addresses)
    inference = olla_fx.optimize(mlp().eval(), vectors(1)[0][0], fallback="raise")
    assert_same(inference(vectors(1)[0][0]), remake(inference)(vectors(1)[0][0]), "inference")


def test_a_planned_module_within_a_copied_model():
    model = mlp()
    outer = copy.deepcopy(
        nn.Sequential(olla_fx.optimize(model, vectors(1)[0][0], fallback="raise"), nn.Linear(3, 3))
    )
    x, y = vectors(1)[0]
    F.cross_entropy(outer(x), y).backward()
    assert all(parameter.grad is not None for parameter in outer.parameters())
    assert model[0].weight.grad is None


def test_checkpoints_in_the_middle_of_training(tmp_path):
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0]).run(images(3))
    states = {"model": pair.step.state_dict(), "optimizer": pair.optimizers[1].state_dict()}
    torch.save(states, tmp_path / "c")
    pair.run(images(2))
    saved = torch.load(tmp_path / "c")
    later = WholeStep(SmallNet(), ADAMW, images(1)[0])
    for called, _, optimizer in later.sides():
        called.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    later.run(images(20))


def test_an_average_of_the_weights():
    pair = WholeStep(SmallNet(), ADAMW, images(1)[0])
    averages = [
        optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for _, model, _ in pair.sides()
    ]
    for batch in images(20):
        pair.train(batch)
        for average, (_, model, _) in zip(averages, pair.sides(), strict=True):
            average.update_parameters(model)
    assert_same_models(*averages)


def note_sum(module, inputs, output):
    module.sums = [*getattr(module, "sums", []), float(output.detach().sum())]


@pytest.mark.parametrize("remake", [copied, pickled])
def test_a_copy_keeps_hooks_and_attributes_of_the_planned_module(remake):
    x = vectors(1)[0][0]
    module = olla_fx.optimize(mlp(), x, fallback="raise")
    module.register_forward_hook(note_sum)
    module.note = {"epoch": 3}
    other = remake(module)
    assert other.note == module.note
    assert other.note is not module.note
    for _ in range(3):
        answer = other(x)
    assert other.sums == [float(answer.detach().sum())] * 3
    assert not hasattr(module, "sums")
    assert_same(module(x).detach(), answer.detach(), "answer")


def test_a_loss_without_a_name_cannot_be_pickled():
    model, (x, y) = mlp(), vectors(1)[0]
    step = olla_fx.optimize(
        model,
        (x, y),
        loss_fn=lambda output, target: F.cross_entropy(output, target),
        optimizer=sgd(model.parameters()),
        fallback="raise",
    )
    with pytest.raises(olla_fx.OllaError, match=r"lambda> cannot be pickled.*with def"):
        pickle.dumps(step)
