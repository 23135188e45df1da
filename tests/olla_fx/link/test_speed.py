"""Which link a step swaps over: the one that is given, or that of a CUDA device, measured."""

import pytest
import torch

from olla_fx.errors import HostMemoryError, SwapError
from olla_fx.link import link_for, speed
from olla_fx.options import Options
from olla_solvers.swapping.transfers import Link
from tests.olla_fx.transfers import FAST, swapping

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MEASURED = Link(12e9, 13e9)


@pytest.fixture
def a_gpu(monkeypatch):
    """Let there be a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(speed, "_measured", lambda index: MEASURED)


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_cuda"),
    [
        ({}, None, None),
        ({"memory_budget": 0.5}, None, MEASURED),
        ({"memory_budget": 0.5, "swap": False}, None, None),
        ({"memory_budget": 0.5, "cuda_graph": True}, None, None),
        ({"memory_budget": 0.5, "link": "16GB/s"}, Link(16e9, 16e9), Link(16e9, 16e9)),
        ({"memory_budget": 0.5, "swap": True, "link": 1e9}, Link(1e9, 1e9), Link(1e9, 1e9)),
        ({"swap": swapping(FAST)}, FAST, FAST),
    ],
)
@pytest.mark.usefixtures("a_gpu")
def test_links(options, on_cpu, on_cuda):
    assert link_for(Options(**options), CPU) == on_cpu
    assert link_for(Options(**options), CUDA) == on_cuda


@pytest.mark.usefixtures("a_gpu")
def test_where_device_and_host_are_one_a_link_is_to_be_given():
    options = Options(memory_budget=0.5, swap=True)
    assert link_for(options, CUDA) == MEASURED
    with pytest.raises(SwapError, match=r"swap=True on cpu: .* give link='16GB/s'"):
        link_for(options, CPU)


def test_a_device_that_is_not_here_has_no_link_to_measure():
    assert link_for(Options(memory_budget=0.5), CUDA) is None
    with pytest.raises(SwapError, match="or it is not here"):
        link_for(Options(memory_budget=0.5, swap=True), CUDA)


def test_without_page_locked_memory_nothing_is_swapped_unless_it_is_asked_for(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(HostMemoryError, match="page-locked memory"):
        link_for(Options(memory_budget=0.5, swap=True), CUDA)
    with pytest.warns(RuntimeWarning, match=r"nothing is swapped: the host has no 64\.00 MiB of page-locked"):
        assert link_for(Options(memory_budget=0.5), CUDA) is None
