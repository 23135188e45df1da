"""A forward runs with the stock allocator, or in eager, while the buffer holds what a backward needs."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx import StepModeError
from tests.olla_fx.comparisons import assert_close, assert_same
from tests.olla_fx.harness import OwnLoop, assert_served
from tests.olla_fx.helpers import SmallNet, images, mlp
from tests.olla_fx.run.fallback.falling import ONE_PLAN_A_SIZE


def test_a_forward_in_another_thread_while_the_buffer_is_busy():
    pair = OwnLoop(SmallNet(0.0), images(1)[0][0]).run(images(2))
    for batch, other in zip(images(20), images(20)[::-1], strict=True):
        pair.zero_grad()
        first = pair.losses(batch)
        assert pair.step.stats.is_busy
        second = []
        thread = threading.Thread(
            target=lambda losses, batch: losses.extend(pair.losses(batch)), args=(second, other)
        )
        thread.start()
        thread.join()
        for eager, planned in (second, first):
            eager.backward()
            planned.backward()
        pair.compare_gradients()
        pair.update()
    pair.compare()
    pair.assert_served(stock_runs=20)


def test_another_forward_while_the_buffer_is_busy():
    """Sharing the buffer gave a gradient of 20 where eager has 12."""
    pair = OwnLoop(SmallNet(0.0), images(1)[0][0]).run(images(2))
    batches = images(4)
    pair.zero_grad()
    first = pair.losses(batches[0])
    assert pair.step.stats.is_busy
    second = pair.losses(batches[1])
    with torch.no_grad():
        assert_same(pair.eager(batches[2][0]), pair.step(batches[2][0]), "under no_grad")
    repeated = pair.losses(tuple(tensor[[0, 0]] for tensor in batches[3]))
    assert pair.step.stats.stock_runs == 3
    for losses in (second, first, repeated):
        for loss in losses:
            loss.backward()
    pair.compare_gradients()
    assert not pair.step.stats.is_busy
    pair.run(images(3))
    pair.assert_served(stock_runs=3)


def test_a_dropped_graph_gives_the_buffer_back():
    pair = OwnLoop(SmallNet(), images(1)[0][0]).run(images(2))
    gc.disable()
    try:
        loss = pair.losses(images(1)[0])
        assert pair.step.stats.is_busy
        del loss
        assert not pair.step.stats.is_busy
    finally:
        gc.enable()
    pair.run(images(2))
    pair.assert_served()


def test_a_first_call_without_backward():
    pair = OwnLoop(SmallNet(), images(1)[0][0])
    pair.losses(images(1)[0])
    pair.run(images(4))
    pair.assert_served()


def test_several_threads():
    """Each thread trains on its own; one that finds the buffer busy runs with the stock allocator."""
    pair = OwnLoop(SmallNet(0.0), images(1)[0][0]).run(images(2))
    batches = images(8)
    expected = [torch.autograd.grad(pair.eager(image).sum(), pair.eager.conv.weight) for image, _ in batches]
    given = {}

    def work(index):
        for _ in range(5):
            output = pair.step(batches[index][0])
            given[index] = torch.autograd.grad(output.sum(), pair.model.conv.weight)

    pair.eager.eval()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(8):
        assert_same(expected[index], given[index], f"thread {index}")
    assert not pair.step.stats.is_busy


def test_the_buffer_cannot_be_poisoned_while_it_is_needed():
    step = OwnLoop(mlp(), torch.ones(4, 6)).step
    answer = step(torch.ones(4, 6))
    with pytest.raises(StepModeError, match="still needs"):
        step.poison()
    answer.sum().backward()
    step.poison()


def test_a_small_model_that_is_called_many_times_before_backward():
    """A plan that saves nothing beside the run that holds the buffer would only take longer than eager."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    eager = copy.deepcopy(policy)
    planned = olla_fx.optimize(policy, torch.zeros(1, 4))
    states = torch.randn(6, 1, 4)
    for turn in range(1, 5):
        losses = [sum(model(x).square().sum() for x in states) for model in (eager, planned)]
        assert_same(*losses, "loss")
        for loss in losses:
            loss.backward()
        assert planned.stats.eager_runs == 5 * turn
    for theirs, ours in zip(eager.parameters(), policy.parameters(), strict=True):
        assert_close(theirs.grad, ours.grad, "gradient")
    planned(states[0])
    assert_served(planned)
    assert planned.stats.stock_runs == 0


def test_a_large_call_beside_a_small_run_is_planned():
    model = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 2))
    planned = olla_fx.optimize(model, torch.zeros(2048, 4), **ONE_PLAN_A_SIZE)
    small, large = torch.randn(1, 4), torch.randn(2048, 4)
    for x in (large, large, small, small, small):
        planned(x).sum().backward()
    before = planned.stats
    waiting = planned(small)
    assert planned.plan.peak_bytes < 1 << 20
    planned(large).sum().backward()
    assert planned.stats.stock_runs == before.stock_runs + 1
    planned(small).sum().backward()
    assert planned.stats.eager_runs == before.eager_runs + 1
    waiting.sum().backward()
