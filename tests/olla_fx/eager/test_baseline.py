"""The memory that eager needs, recorded and dispatched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from olla_fx.arena import AllocationEvent, EventKind, available
from olla_fx.eager.baseline import (
    Baseline,
    BaselineSource,
    baseline_from_events,
    dispatched_baseline,
    follow_step,
    record_baseline,
)

MIB = 2**20
Step = Callable[[], object]


def event(kind: str, block: int, size_bytes: int) -> AllocationEvent:
    return AllocationEvent(EventKind(kind), block, size_bytes, True)


def test_a_stream_by_hand() -> None:
    events = [
        event("alloc", 0, 100),
        event("alloc", 1, 3 * MIB),
        event("free", 0, 100),
        event("alloc", 2, 0),
        event("alloc", 3, 200),
    ]
    baseline = baseline_from_events(events)
    assert baseline.live_peak_bytes == 3 * MIB + 200
    assert baseline.reserved_bytes == 22 * MIB
    assert baseline.fragmentation == pytest.approx(1 - (3 * MIB + 512) / (22 * MIB))
    assert baseline.requests == 3
    assert baseline.source == "recorded"


def test_baselines_survive_json() -> None:
    baseline = Baseline(1, 2, 0.5, 3, BaselineSource.DISPATCHED)
    assert Baseline.from_json(baseline.to_json()) == baseline
    with pytest.raises(ValueError, match="no baseline: KeyError: 'reserved_bytes'"):
        Baseline.from_json({"live_peak_bytes": 1})


def mlp_step() -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, target = torch.randn(32, 64), torch.zeros(32, dtype=torch.long)

    def step() -> object:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.skipif(not available(), reason="needs the native allocator")
def test_the_recorded_baseline_of_an_mlp_is_bounded_by_what_must_be_alive() -> None:
    baseline = record_baseline(mlp_step())
    gradients = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    activations = 4 * 32 * 256
    assert baseline.source is BaselineSource.RECORDED
    assert gradients <= baseline.live_peak_bytes <= gradients + 3 * activations
    assert baseline.reserved_bytes == 2 * MIB


def test_dispatched_storages_are_born_once_and_die_with_their_last_view() -> None:
    def step() -> object:
        base = torch.ones(100)
        view = base.view(10, 10)[2:]
        del base
        view.add_(1)
        return (view * 2).sum()

    with FakeTensorMode():
        events = follow_step(step).events
    assert [(event.block, event.size_bytes) for event in events if event.kind is EventKind.ALLOC] == [
        (0, 400),
        (1, 320),
        (2, 4),
    ]
    # The view held the first storage until the step returned; the last is alive at its end.
    assert sorted(event.block for event in events[3:]) == [0, 1]
    assert all(event.kind is EventKind.FREE for event in events[3:])


def test_dispatched_storages_from_before_the_step_are_static() -> None:
    with FakeTensorMode():
        weight = torch.ones(100)
        held = [torch.ones(50)]

        def step() -> object:
            weight.mul_(2)
            held[0].add_(1)
            held.clear()
            return weight.view(10, 10)

        assert follow_step(step).events == ()


def test_the_dispatched_baseline_of_an_mlp_agrees_with_the_recorded_one() -> None:
    with FakeTensorMode():
        dispatched = dispatched_baseline(mlp_step())
    assert dispatched.source is BaselineSource.DISPATCHED
    gradients = 4 * (64 * 256 + 256 + 256 * 10 + 10)
    assert gradients <= dispatched.live_peak_bytes
    if available():
        recorded = record_baseline(mlp_step())
        assert dispatched.live_peak_bytes == pytest.approx(recorded.live_peak_bytes, rel=0.1)


def resnet18_step() -> Step:
    try:
        import torchvision
    except RuntimeError:  # its operators are missing: a build for another torch
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        library.define("qnms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        import torchvision
    model = torchvision.models.resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    image, target = torch.randn(1, 3, 224, 224), torch.zeros(1, dtype=torch.long)

    def step() -> object:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.skipif(not available(), reason="needs the native allocator")
def test_resnet18_needs_what_was_measured_before() -> None:
    recorded = record_baseline(resnet18_step())
    with FakeTensorMode():
        dispatched = dispatched_baseline(resnet18_step())
    assert recorded.live_peak_bytes / MIB == pytest.approx(62.3, abs=1)
    assert recorded.reserved_bytes / MIB == pytest.approx(78, abs=4)
    assert recorded.fragmentation == pytest.approx(0.19, abs=0.03)
    assert dispatched.live_peak_bytes <= recorded.live_peak_bytes
    assert dispatched.live_peak_bytes == pytest.approx(recorded.live_peak_bytes, rel=0.03)
