"""Operators are timed on numbers of our own, within a time and a memory, and leave nothing behind."""

import time

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx.arena import Arena, Buffer
from olla_fx.costs import measure_kinds, measuring, operator_seconds
from olla_fx.costs.kinds import can_be_measured, kind_of
from tests.olla_fx.costs.nodes import CPU, dataflow_of
from tests.olla_fx.helpers import SmallNet, captured_training, front, images

aten = torch.ops.aten
LONG = 60.0
MIB = 1 << 20


@pytest.fixture
def dataflow():
    return front(captured_training(SmallNet(), images(1)[0]))


def test_a_product_takes_what_it_takes():
    size = 512
    dataflow = dataflow_of(aten.mm.default, torch.empty(size, size), torch.empty(size, size))
    (measured,) = measure_kinds(dataflow, {}, LONG).values()
    left, right = torch.rand(2, size, size).unbind()
    times = []
    for _ in range(9):
        started = time.thread_time()
        left @ right
        times.append(time.thread_time() - started)
    assert min(times) / 2 < measured.seconds < 4 * max(times)
    assert measured.operator == "mm"
    assert measured.work.flops == 2 * size**3


def test_a_whole_step_can_be_measured(dataflow):
    measured = measure_kinds(dataflow, {}, LONG)
    expected = {kind_of(node) for node in dataflow.operators if can_be_measured(node, CPU)}
    assert measured.keys() == expected
    assert len(expected) > 10
    assert all(0 < item.seconds < 1 for item in measured.values())
    costs = operator_seconds(dataflow, measurements=measured)
    assert costs.measured_share > 0.8
    assert measure_kinds(dataflow, measured, LONG) == {}


def test_nothing_of_the_callers_changes():
    model, (x, y) = SmallNet(), images(1)[0]
    dataflow = front(captured_training(model, (x, y)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    inputs = x.clone(), y.clone()
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        assert measure_kinds(dataflow, {}, LONG)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, inputs[0])
    assert torch.equal(y, inputs[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_time_nothing_is_measured(dataflow):
    assert measure_kinds(dataflow, {}, 0.0) == {}


def test_the_dearest_come_first(monkeypatch):
    model = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5))
    dataflow = front(captured_training(model, (torch.randn(64, 6), torch.randint(5, (64,)))))
    asked = []
    monkeypatch.setattr(measuring, "_measured", lambda node, *_: asked.append(node))
    assert measure_kinds(dataflow, {}, LONG) == {}
    by_kind = {}
    costs = operator_seconds(dataflow, measurements={})
    for node, seconds in zip(dataflow.operators, costs.seconds, strict=True):
        by_kind[kind_of(node)] = by_kind.get(kind_of(node), 0) + seconds
    spent = [by_kind[kind_of(node)] for node in asked]
    assert spent == sorted(spent, reverse=True)


def test_large_operators_are_left_out():
    dataflow = dataflow_of(aten.relu.default, torch.empty(MIB))
    assert measure_kinds(dataflow, {}, LONG, most_bytes=8 * MIB - 1) == {}
    assert measure_kinds(dataflow, {}, LONG, most_bytes=8 * MIB)


def test_an_operator_that_refuses_its_numbers_is_left_out(caplog):
    dataflow = dataflow_of(aten.linalg_cholesky_ex.default, torch.empty(9, 9), check_errors=True)
    with caplog.at_level("INFO", "olla_fx"):
        assert measure_kinds(dataflow, {}, LONG) == {}
    assert "cannot be measured" in caplog.text


def test_within_a_planned_step_nothing_is_measured(dataflow):
    with Arena(Buffer(0), 1, ()).region():
        assert measure_kinds(dataflow, {}, LONG) == {}


def test_known_requests_are_served():
    """An operator whose requests are known runs in the buffer at once."""
    dataflow = dataflow_of(aten.relu.default, torch.empty(MIB))
    name = dataflow.problem.operators[0].name
    recorded = []
    stopwatch = measuring._Stopwatch
    original = stopwatch._recorded
    try:
        stopwatch._recorded = lambda self, call: recorded.append(call) or original(self, call)
        assert measure_kinds(dataflow, {}, LONG, {name: [(0, 4 * MIB)]})
        assert not recorded
        assert measure_kinds(dataflow, {}, LONG)
        assert recorded
    finally:
        stopwatch._recorded = original


def test_without_the_allocator_operators_are_timed_all_the_same(monkeypatch):
    monkeypatch.setattr(olla_fx.arena, "available", lambda device: False)
    assert measure_kinds(dataflow_of(aten.relu.default, torch.empty(MIB)), {}, LONG)
