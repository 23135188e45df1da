"""A forward runs with the stock allocator while the buffer holds what a backward needs."""

import copy
import gc
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import olla_fx
from olla_fx import StepModeError
from tests.olla_fx.harness import assert_same, assert_same_models, is_busy, stats
from tests.olla_fx.helpers import SmallNet, images, mlp, sgd


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


def test_a_forward_in_another_thread_while_the_buffer_is_busy():
    pair = OwnLoop(SmallNet(0.0), images(1)[0][0]).run(images(2))
    others = images(20, batch=2)[::-1]
    for (image, target), other in zip(images(20), others, strict=True):
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        first = pair.losses(image, target)
        assert is_busy(pair.step)
        second = []
        thread = threading.Thread(target=lambda other=other, found=second: found.extend(pair.losses(other)))
        thread.start()
        thread.join()
        for eager, planned in (second, first):
            eager.backward()
            planned.backward()
        pair.compare_gradients()
        for optimizer in pair.optimizers:
            optimizer.step()
    assert_same_models(pair.eager, pair.model)
    assert stats(pair.step).stock_runs == 20
    stats(pair.step).stock_runs = 0
    pair.assert_served()


def test_another_forward_while_the_buffer_is_busy():
    """Sharing the buffer gave a gradient of 20 where eager has 12."""
    pair = OwnLoop(SmallNet(0.0), images(1)[0][0]).run(images(2))
    batches = images(4)
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    first = pair.losses(batches[0])
    assert is_busy(pair.step)
    second = pair.losses(batches[1])
    with torch.no_grad():
        assert_same(pair.eager(batches[2][0]), pair.step(batches[2][0]), "under no_grad")
    smaller = pair.losses(each[:1].repeat(2, *[1] * (each.dim() - 1)) for each in batches[3])
    assert stats(pair.step).stock_runs == 3
    for losses in (second, first, smaller):
        for loss in losses:
            loss.backward()
    pair.compare_gradients()
    assert not is_busy(pair.step)
    stats(pair.step).stock_runs = 0
    pair.run(images(3))
    pair.assert_served()


def test_a_dropped_graph_gives_the_buffer_back():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(2))
    gc.disable()
    try:
        loss = pair.losses(images(1)[0])
        assert is_busy(pair.step)
        del loss
        assert not is_busy(pair.step)
    finally:
        gc.enable()
    pair.run(images(2))
    pair.assert_served()


def test_a_first_call_without_backward():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    pair.losses(images(1)[0])
    pair.run(images(4))
    pair.assert_served()


def test_threads():
    """Each thread trains on its own; who finds the buffer busy runs beside it."""
    pair = OwnLoop(SmallNet(0.0), images(1)[0][0]).run(images(2))
    batches = images(8)
    expected = [torch.autograd.grad(pair.eager(image).sum(), pair.eager.conv.weight) for image, _ in batches]
    found = {}

    def work(index):
        for _ in range(5):
            output = pair.step(batches[index][0])
            found[index] = torch.autograd.grad(output.sum(), pair.model.conv.weight)

    pair.eager.eval()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(8):
        assert_same(expected[index], found[index], f"thread {index}")
    assert not is_busy(pair.step)


def test_the_buffer_cannot_be_poisoned_while_it_is_needed():
    planned = olla_fx.optimize(mlp(), torch.ones(4, 6))
    answer = planned(torch.ones(4, 6))
    with pytest.raises(StepModeError, match="still needs"):
        planned.poison()
    answer.sum().backward()
    planned.poison()
