"""The CUDA arena by itself: what it serves, and that the stock allocator's other business goes on."""

import gc

import pytest
import torch

from olla_fx import torch_compat
from olla_fx.arena import Arena, Buffer, PlannedRequest, RunCounts, record_events
from olla_fx.eager.recorded_cuda import measure_cuda_baseline
from olla_fx.errors import DeviceError


def floats(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


def two_places(device: torch.device) -> Arena:
    requests = [PlannedRequest(0, 0, 400, 0), PlannedRequest(1, 0, 800, 512)]
    return Arena(Buffer(4096, device), 2, requests)


def test_matching_requests_get_their_planned_addresses(device):
    arena = two_places(device)
    with arena.region():
        arena.begin_operator(0)
        first = floats(100, device)
        arena.begin_operator(1)
        second = floats(200, device)
        surplus = floats(3, device)
    assert first.data_ptr() == arena.buffer.address
    assert second.data_ptr() == arena.buffer.address + 512
    assert not arena.buffer.contains(surplus.data_ptr())
    assert arena.counts() == RunCounts(2, 1200, 0, 1, 12, 0)
    assert arena.buffer.outstanding_blocks == 2
    del first, second
    assert arena.buffer.outstanding_blocks == 0


def test_another_stream_is_not_served(device):
    arena = two_places(device)
    with arena.region():
        arena.begin_operator(0)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            elsewhere = floats(100, device)
        here = floats(100, device)
    assert not arena.buffer.contains(elsewhere.data_ptr())
    assert arena.buffer.contains(here.data_ptr())
    assert arena.counts().requests_on_worker_threads == 1
    assert arena.counts().served == 1


def test_a_second_device_is_not_served(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1 - (device.index or 0))
    arena = two_places(device)
    with arena.region():
        arena.begin_operator(0)
        assert not arena.buffer.contains(floats(100, other).data_ptr())
        assert arena.buffer.contains(floats(100, device).data_ptr())


def test_statistics_and_snapshots_tell_of_the_buffer_and_of_what_is_outside(device):
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    arena = two_places(device)
    assert torch.cuda.memory_allocated(device) == before + 4096
    with arena.region():
        arena.begin_operator(0)
        served = floats(100, device)
        assert torch.cuda.memory_allocated(device) == before + 4096
        outside = floats(1000, device)
        assert torch.cuda.memory_allocated(device) == before + 4096 + 4096
    assert torch.cuda.memory_snapshot()
    assert torch.cuda.get_allocator_backend() == "native"
    del served, outside, arena
    gc.collect()
    assert torch.cuda.memory_allocated(device) == before


def test_a_block_that_outlives_its_arena_keeps_the_buffer(device):
    before = torch.cuda.memory_allocated(device)
    arena = two_places(device)
    with arena.region():
        arena.begin_operator(0)
        block = floats(100, device).copy_(torch.full((100,), 3.0))
    del arena
    gc.collect()
    assert torch.cuda.memory_allocated(device) == before + 4096
    assert torch.equal(block.cpu(), torch.full((100,), 3.0))
    del block
    assert torch.cuda.memory_allocated(device) == before


def test_work_on_a_side_stream_is_done_before_its_place_is_used_again(device):
    """The side stream reads slowly from the block while the next operator writes to the same place."""
    requests = [PlannedRequest(0, 0, 4 * 2**20, 0), PlannedRequest(1, 0, 4 * 2**20, 0)]
    arena = Arena(Buffer(4 * 2**20, device), 2, requests)
    side = torch.cuda.Stream(device)
    copied = torch.empty(2**20, device=device)
    for _ in range(3):
        with arena.region():
            arena.begin_operator(0)
            first = floats(2**20, device).fill_(1.0)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                copied.copy_(first)
            first.record_stream(side)
            del first
            arena.begin_operator(1)
            second = floats(2**20, device).fill_(2.0)
        torch.cuda.synchronize(device)
        assert arena.buffer.contains(second.data_ptr())
        assert copied.eq(1.0).all().item()
        del second


def test_a_step_on_another_stream_waits_for_the_one_before(device):
    arena = Arena(Buffer(4 * 2**20, device), 1, [PlannedRequest(0, 0, 4 * 2**20, 0)])
    slow, fast = torch.cuda.Stream(device), torch.cuda.Stream(device)
    kept = torch.empty(2**20, device=device)
    with torch.cuda.stream(slow), arena.region():
        arena.begin_operator(0)
        first = floats(2**20, device).fill_(1.0)
        torch.cuda._sleep(50_000_000)
        kept.copy_(first)
        del first
    with torch.cuda.stream(fast), arena.region():
        arena.begin_operator(0)
        floats(2**20, device).fill_(2.0)
    torch.cuda.synchronize(device)
    assert kept.eq(1.0).all().item()


def test_a_recording_sees_requests_and_frees_and_streams_of_stock_blocks(device):
    arena = Arena(Buffer(0, device), 1, [])
    with arena.region(record=True):
        arena.begin_operator(0)
        freed = floats(100, device)
        freed.record_stream(torch.cuda.Stream(device))
        del freed
        kept = floats(200, device)
    first, second = arena.recording()
    assert (first.size_bytes, second.size_bytes) == (400, 800)
    assert first.freed_in_operator == 0
    assert second.freed_at is None
    assert second.address == kept.data_ptr()


def test_a_buffer_larger_than_the_device_is_an_error_that_leaves_nothing_behind(device):
    before = torch.cuda.memory_allocated(device)
    with pytest.raises(MemoryError, match="cannot allocate a buffer"):
        Buffer(2**50, device)
    assert torch.cuda.memory_allocated(device) == before


def test_the_baseline_measures_peak_and_reserve(device):
    def step() -> torch.Tensor:
        large = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
        return large[:1].clone()

    before = torch.cuda.memory_allocated(device)
    baseline = measure_cuda_baseline(step, device)
    assert baseline.max_allocated_bytes - before >= 64 * 2**20
    assert baseline.max_reserved_bytes >= baseline.max_allocated_bytes
    assert 0 <= baseline.fragmentation < 1
    with pytest.raises(DeviceError, match="no CUDA device"):
        measure_cuda_baseline(step, torch.device("cpu"))


def test_events_of_the_host_are_still_recorded(device):
    with record_events() as recording:
        torch.empty(100)
        floats(100, device)
    assert [event.size_bytes for event in recording.events if event.size_bytes == 400]


def test_a_graph_is_captured_of_a_buffer_that_a_side_stream_has_worked_on(device):
    arena = two_places(device)
    with arena.region():
        arena.begin_operator(0)
        floats(100, device).record_stream(torch.cuda.Stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch_compat.capturing(graph, torch.cuda.Stream(device)), arena.region():
        arena.begin_operator(0)
        block = floats(100, device).fill_(1.0)
    assert arena.buffer.contains(block.data_ptr())
    graph.replay()


def test_an_empty_buffer_belongs_to_the_device_it_was_asked_for(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1 - (device.index or 0))
    arena = Arena(Buffer(0, other), 1, [])
    with arena.region(record=True):
        arena.begin_operator(0)
        floats(100, device)
        kept = floats(200, other)
    assert [request.address for request in arena.recording()] == [kept.data_ptr()]
