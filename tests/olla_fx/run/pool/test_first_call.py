"""The first call is recorded on the stock allocator, and never needs more than eager."""

import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.arena import record_events
from olla_fx.eager.baseline import baseline_from_events
from tests.olla_fx.comparisons import assert_same, assert_same_models
from tests.olla_fx.harness import OwnLoop, WholeStep, check_inference
from tests.olla_fx.helpers import images, sgd


def deep(layers=6):
    parts = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(layers):
        parts += [nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def live_peak_bytes(step):
    """Return what a step returns, and the most bytes that are alive while it runs."""
    with record_events() as recording:
        result = step()
    return result, baseline_from_events(recording.events).live_peak_bytes


def test_a_first_whole_step(buffers):
    batch = images(1, 4, 16)[0]
    # Without state, which eager makes at the end of its first step.
    pair = WholeStep(deep(), sgd, batch)
    torch.manual_seed(0)
    expected, eager_bytes = live_peak_bytes(lambda: pair.train_eager(batch))
    torch.manual_seed(0)
    given, first_bytes = live_peak_bytes(lambda: pair.step(*batch))
    assert_same(expected, given, "loss")
    assert first_bytes <= eager_bytes
    assert buffers.made == 0
    assert_same_models(pair.eager, pair.model)
    pair.train(batch)
    assert buffers.sizes() == [pair.step.plan.buffer_bytes]


def test_a_first_forward_and_backward(buffers):
    x, y = images(1, 4, 16)[0]
    pair = OwnLoop(deep(), x)
    peaks = []
    for called, _, optimizer in pair.sides():

        def step(called=called, optimizer=optimizer):
            F.cross_entropy(called(x), y).backward()
            optimizer.step()

        peaks.append(live_peak_bytes(step)[1])
    # Autograd holds the gradient of the outputs while a node runs, and the planned backward is one node.
    assert peaks[1] <= peaks[0] + 4 * 5 * 4
    assert buffers.made == 0
    assert_same_models(pair.eager, pair.model)
    pair.run([(x, y)])
    pair.assert_served()
    assert buffers.sizes() == [pair.step.plan.buffer_bytes]


def test_a_first_inference(buffers):
    x = images(1, 4, 16)[0][0]
    model = deep().eval()
    with torch.no_grad():
        _, eager_bytes = live_peak_bytes(lambda: model(x))
    step = check_inference(model, [(x,)], 1)
    assert buffers.made == 0
    step.replan()
    _, first_bytes = live_peak_bytes(lambda: step(x))
    assert buffers.made == 0
    assert first_bytes <= eager_bytes
