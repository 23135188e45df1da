"""Listening to a loop: its iteration is found, and what a plan would save."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import olla_fx
from olla_fx import RecordingError
from olla_fx.arena import AllocationEvent, EventKind
from olla_fx.eager.iterations import find_period, spans_of_iteration
from olla_fx.run.executor import MOST_RECORDINGS
from olla_solvers.spans import max_live_bytes
from tests.olla_fx.comparisons import assert_same_models
from tests.olla_fx.helpers import SmallNet, images


class Stream:
    """Writes events."""

    def __init__(self):
        self.events, self.sizes = [], []

    def request(self, size_bytes):
        self.sizes.append(size_bytes)
        block = len(self.sizes) - 1
        self.events.append(AllocationEvent(EventKind.ALLOC, block, size_bytes, True))
        return block

    def free(self, block):
        self.events.append(AllocationEvent(EventKind.FREE, block, self.sizes[block], True))

    def iteration(self, layers, kept):
        """Equal layers forwards and backwards: repetitions within one iteration; one block outlives it."""
        blocks = [self.request(640) for _ in range(layers)]
        loss = self.request(64)
        self.free(kept) if kept is not None else None
        for block in reversed(blocks):
            gradient = self.request(128)
            self.free(block)
            self.free(gradient)
        return loss


@given(
    layers=st.integers(1, 12),
    iterations=st.integers(6, 9),
    noise=st.lists(st.integers(1, 9), max_size=5),
    tail=st.integers(0, 3),
)
def test_the_iteration_is_found_in_noise(layers, iterations, noise, tail):
    stream = Stream()
    for size_bytes in noise:
        stream.free(stream.request(size_bytes))
    kept = None
    for _ in range(iterations):
        kept = stream.iteration(layers, kept)
    for _ in range(tail):
        stream.request(7)
    period = find_period(stream.events)
    assert period is not None
    assert period.length == 4 * layers + 2
    # The first differs, having nothing to free yet, and another may be cut off.
    assert iterations - 2 <= period.repetitions <= iterations
    spans = spans_of_iteration(stream.events, period)
    assert sorted(span.size_bytes for span in spans) == sorted([640] * layers + [128] * layers + [64])
    assert max_live_bytes(spans) == max(640 * layers + 128 + 64, 640 * layers + 64)


def test_nothing_repeats():
    stream = Stream()
    for size_bytes in range(1, 50):
        stream.request(size_bytes)
    assert find_period(stream.events) is None
    assert find_period([]) is None


def test_an_eager_loop():
    model = SmallNet()
    unheard = copy.deepcopy(model)
    batch = images(1, batch=4, size=16)[0]

    def train(trained):
        optimizer = torch.optim.AdamW(trained.parameters())
        torch.manual_seed(1)
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(trained(batch[0]), batch[1]).backward()
            optimizer.step()

    with olla_fx.record() as recording:
        train(model)
    train(unheard)
    assert_same_models(unheard, model)  # listening changes nothing
    report = recording.report()
    assert report.iterations >= 4
    assert report.requests > 50
    assert report.live_peak_bytes <= report.buffer_bytes < report.baseline.reserved_bytes
    assert report.buffer_bytes <= 1.05 * report.live_peak_bytes
    assert "one buffer, planned addresses" in str(report)


def test_too_short_a_loop():
    with olla_fx.record() as recording:
        torch.ones(3)
    with pytest.raises(RecordingError, match="at least four steps"):
        recording.report()


def test_interrupted_work_is_not_planned():
    """An operator of the caller's own whose requests change from call to call stays outside, uncounted."""

    @torch.library.custom_op("olla_fx_tests::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        with olla_fx.interrupted():
            torch.empty(noisy.calls * 1000)
        noisy.calls += 1
        return x * 2

    noisy.calls = 1

    @noisy.register_fake
    def _(x):
        return torch.empty_like(x)

    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(6, 6)

        def forward(self, x):
            return noisy(self.body(x))

    step = olla_fx.optimize(Noisy().eval(), torch.ones(4, 6), fallback="raise")
    step(torch.ones(4, 6))
    for _ in range(5):
        step(torch.ones(4, 6))
        assert step.stats.counts.outside == 0, step.stats.outside_log
    assert step.stats.binding == "buffer"
    assert step.stats.counts.served > 0


class Scratch(torch.nn.Module):
    """A layer, and an operator with as much scratch memory as it is told to take."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 6)

    def forward(self, x):
        return growing(self.body(x))


@torch.library.custom_op("olla_fx_tests::growing", mutates_args=())
def growing(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty(growing.scratch)
    return x * 2 + scratch.new_zeros(())


growing.scratch = 1000


@growing.register_fake
def _(x):
    return torch.empty_like(x)


def planned_with_scratch():
    """Return a planned inference, and a function that calls it with scratch memory, compared with eager."""
    model = Scratch().eval()
    growing.scratch = 1000
    step = olla_fx.optimize(model, torch.ones(4, 6), fallback="raise")

    def outside(scratch):
        growing.scratch = scratch
        with torch.no_grad():
            expected = model(torch.ones(4, 6))
        step.poison()
        assert torch.equal(expected, step(torch.ones(4, 6)))
        assert step.stats.binding == "buffer"
        assert step.stats.counts.served > 0
        return step.stats.counts.outside

    step(torch.ones(4, 6))
    return step, outside


def test_larger_requests_lead_to_a_new_plan():
    """Profile-guided allocation §4.3: served outside once, and planned for afterwards."""
    step, outside = planned_with_scratch()
    before = step.plan.buffer_bytes
    assert outside(1000) == 0
    assert outside(900) == 0  # smaller ones reuse the place
    assert outside(5000) == 1
    outside(5000)
    assert step.plan.buffer_bytes > before + 10_000
    assert outside(5000) == 0
    assert outside(1000) == 0


def test_requests_that_keep_changing_are_recorded_only_so_often():
    """Each recording leads to a new graph."""
    step, outside = planned_with_scratch()
    graph_modules = {step.graph_module}
    for call in range(1, 21):
        outside(1000 + 1000 * call)
        graph_modules.add(step.graph_module)
    assert len(graph_modules) == MOST_RECORDINGS
    assert outside(30_000) == outside(30_000) == 1
