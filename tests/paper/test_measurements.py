"""Traces, baselines and models that the paper's figures are measured on."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch
from paper_figures import baselines, measure, traces
from paper_figures.allocation import allocation_times

from olla_fx.arena import AllocationEvent, EventKind
from olla_fx.models import build_model
from tests.paper.jobs import make_job

ALLOC, FREE = EventKind.ALLOC, EventKind.FREE


EVENTS = (
    AllocationEvent(ALLOC, 0, 100, True),
    AllocationEvent(ALLOC, 1, 200, True),
    AllocationEvent(FREE, 0, 100, True),
    AllocationEvent(ALLOC, 2, 50, True),
    AllocationEvent(FREE, 1, 200, True),
    AllocationEvent(ALLOC, 3, 70, False),
)


def test_on_a_gpu_memory_taken_before_the_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = types.SimpleNamespace(
        max_allocated_bytes=300, max_reserved_bytes=500, fragmentation=0.2, allocator_settings=""
    )
    runs: list[int] = []

    def measure(step: Callable[[], object], device: torch.device) -> types.SimpleNamespace:
        assert runs == [1], "its first run chooses kernels and makes handles"
        return baseline

    module = types.SimpleNamespace(measure_cuda_baseline=measure)
    monkeypatch.setitem(sys.modules, "olla_fx.eager.recorded_cuda", module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    needed = baselines.measured(lambda: runs.append(1), "cuda")
    # 100 of 500 bytes are wasted, which is 100 of the 400 that are this step's own.
    assert (needed.live_bytes, needed.reserved_bytes, needed.fragmentation) == (200, 400, 0.25)
    assert (needed.source, needed.allocator) == ("measured on the GPU", "default")
    assert baselines.measured_on_cuda(lambda: None, 50).live_bytes == 250


@pytest.mark.parametrize(("device", "calls_before"), [("cpu", 1), ("cuda", 2)])
def test_no_step_is_timed_that_is_recorded(
    monkeypatch: pytest.MonkeyPatch, device: str, calls_before: int
) -> None:
    case = build_model("torch:transformer-1", batch_size=1, train=False)
    calls: list[str] = []

    def paired(eager: Callable[[], object], planned: Callable[[], object], _: bool) -> tuple[float, float]:
        calls.append("timed")
        return 2.0, 1.0

    monkeypatch.setattr(measure, "paired", paired)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seconds = measure.times(case, None, lambda *_: calls.append("settles"), device)
    assert calls == ["settles"] * calls_before + ["timed"] * measure.PAIRS
    assert seconds == {"eager_seconds": 2.0, "planned_seconds": 1.0}


def test_a_trace_becomes_rectangles_in_eagers_order() -> None:
    spans = traces.spans_of(EVENTS, alignment=64)
    rectangles = [(span.name, span.lower, span.upper, span.size_bytes) for span in spans]
    assert rectangles == [("0", 0, 2, 128), ("1", 1, 4, 256), ("2", 3, 6, 64), ("3", 5, 6, 128)]
    assert traces.live_peak_bytes(EVENTS) == 300


def test_allocations_are_made_again_but_not_those_of_other_threads() -> None:
    times = allocation_times(EVENTS, "cpu")
    assert times.requests == 3
    assert times.stock_seconds > 0
    assert times.served_seconds > 0


def test_a_step_that_does_not_fit_is_followed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_model("torch:transformer-1", batch_size=1)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in case.model.parameters()]
    monkeypatch.setattr(traces, "available_bytes", lambda: 2**30)
    events, source = traces.trace(case, optimizer, run=True)
    assert source == "dispatched"
    assert events
    assert all(map(torch.equal, before, case.model.parameters()))


@pytest.mark.parametrize(
    ("model", "shape", "millions"),
    [
        ("seq2seq.py:seq2seq", (50, 2, 40_000), 173.3),
        ("cifar.py:resnet18", (2, 10), 11.2),
        ("cifar.py:vgg16", (2, 10), 15.0),
    ],
)
def test_the_papers_models_have_their_shapes(model: str, shape: tuple[int, ...], millions: float) -> None:
    case = build_model(make_job(model).model_name, batch_size=2, device="meta")
    *inputs, _ = case.inputs
    assert tuple(case.model(*inputs).shape) == shape
    count = sum(parameter.numel() for parameter in case.model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.05)


def test_inception_resnets_stages_have_the_papers_sizes() -> None:
    name = make_job("inception_resnet.py:inception_resnet_v2").model_name
    case = build_model(name, batch_size=2, device="meta")
    x, sizes = case.inputs[0], []
    for stage in case.model:
        x = stage(x)
        sizes.append(tuple(x.shape[1:]))
    # Figures 3 and 15 to 19 of its paper: the stem, five blocks, a reduction, ten, a reduction, five.
    blocks = [(384, 35, 35)] * 6 + [(1152, 17, 17)] * 11 + [(2144, 8, 8)] * 6
    assert sizes == [*blocks, (2144, 1, 1), (2144,), (2144,), (1000,)]


def test_recurrent_layers_are_left_to_pytorchs_own_kernels() -> None:
    """Of eager, too: what cuDNN does with them cannot be captured."""
    model = torch.nn.LSTM(3, 4)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.backends.cudnn.flags(enabled=True):
        measure.leave_recurrent_layers_to_pytorch(torch.nn.Linear(3, 4))
        assert torch.backends.cudnn.enabled
        measure.leave_recurrent_layers_to_pytorch(model)
        assert not torch.backends.cudnn.enabled
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 4
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), weights)


def test_seq2seq_writes_a_hundred_words_when_it_does_not_train() -> None:
    case = build_model(make_job("seq2seq.py:seq2seq").model_name, batch_size=2, train=False, device="meta")
    assert tuple(case.model(*case.inputs).shape) == (100, 2)
