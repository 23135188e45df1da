"""Which requests the arena serves, and what becomes of the others."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from olla_fx.arena import (
    Arena,
    Buffer,
    PlannedRequest,
    RunCounts,
    in_region,
    interrupted,
)
from olla_fx.errors import ArenaBusyError


def floats(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32)


def two_places() -> Arena:
    return Arena(Buffer(2048), 2, [PlannedRequest(0, 0, 400, 0), PlannedRequest(1, 0, 800, 512)])


def test_matching_requests_get_their_planned_addresses() -> None:
    arena = two_places()
    with arena.region():
        arena.begin_operator(0)
        first = floats(100)
        arena.begin_operator(1)
        second = floats(200)
    assert first.data_ptr() == arena.buffer.address
    assert second.data_ptr() == arena.buffer.address + 512
    assert arena.buffer.contains(second.data_ptr())
    assert not arena.buffer.contains(arena.buffer.address + 2048)
    assert arena.counts() == RunCounts(2, 1200, 0, 0, 0, 0)


def test_a_request_that_does_not_fit_goes_to_the_stock_allocator_and_is_logged() -> None:
    arena = Arena(Buffer(2048), 1, [PlannedRequest(0, 0, 400, 0), PlannedRequest(0, 1, 800, 512)])
    with arena.region():
        arena.begin_operator(0)
        larger = floats(101)
        matching = floats(200)
        surplus = floats(7)
        arena.begin_operator(5)
        unknown = floats(3)
    assert [arena.buffer.contains(tensor.data_ptr()) for tensor in (larger, matching, surplus, unknown)] == [
        False,
        True,
        False,
        False,
    ]
    assert arena.counts() == RunCounts(1, 800, 0, 3, 404 + 28 + 12, 0)
    assert arena.outside_log() == ((0, 0, 404), (0, 2, 28), (5, 0, 12))


def test_a_smaller_request_reuses_the_place() -> None:
    arena = Arena(Buffer(2048), 1, [PlannedRequest(0, 0, 400, 0), PlannedRequest(0, 1, 800, 512)])
    with arena.region():
        arena.begin_operator(0)
        addresses = [floats(count).data_ptr() - arena.buffer.address for count in (99, 1)]
    assert addresses == [0, 512]
    assert arena.counts() == RunCounts(2, 400, 0, 0, 0, 0)


def test_two_programs_share_a_buffer_and_run_in_turn() -> None:
    buffer = Buffer(1024)
    arenas = [Arena(buffer, 1, [PlannedRequest(0, 0, 400, offset)]) for offset in (0, 64)]
    for arena, offset in zip(arenas, (0, 64), strict=True):
        with arena.region():
            arena.begin_operator(0)
            assert floats(100).data_ptr() == buffer.address + offset
            with ThreadPoolExecutor(1) as pool:
                assert isinstance(pool.submit(enter_and_leave, arenas[0]).exception(), ArenaBusyError)
    with arenas[0].region():
        arenas[0].begin_operator(0)
        kept = floats(100)
    with arenas[1].region():
        arenas[1].begin_operator(0)
        # A block that outlives its program keeps its place.
        assert not buffer.contains(floats(100).data_ptr())
    assert buffer.contains(kept.data_ptr())


def enter_and_leave(arena: Arena) -> None:
    with arena.region():
        pass


def test_requests_before_the_first_operator_are_outside() -> None:
    arena = two_places()
    with arena.region():
        floats(100)
    assert arena.outside_log() == ((-1, 0, 400),)


def test_outputs_are_left_outside_on_purpose_and_counted_apart() -> None:
    arena = Arena(Buffer(0), 1, [PlannedRequest(0, 0, 400, None)])
    with arena.region():
        arena.begin_operator(0)
        output = floats(100)
    assert not arena.buffer.contains(output.data_ptr())
    assert arena.counts() == RunCounts(0, 0, 1, 0, 0, 0)


def test_requests_of_zero_bytes_have_no_ordinal_and_are_not_counted() -> None:
    arena = two_places()
    with arena.region(record=True):
        arena.begin_operator(0)
        assert floats(0).numel() == 0
        assert arena.buffer.contains(floats(100).data_ptr())
    assert arena.counts() == RunCounts(1, 400, 0, 0, 0, 0)
    assert [request.ordinal for request in arena.recording()] == [0]


def test_interruptions_nest_and_hide_requests() -> None:
    arena = two_places()
    with arena.region(record=True):
        arena.begin_operator(0)
        with interrupted(), interrupted():
            arena.begin_operator(1)
            hidden = floats(100)
        with interrupted():
            also_hidden = floats(100)
        served = floats(100)
    assert not arena.buffer.contains(hidden.data_ptr())
    assert not arena.buffer.contains(also_hidden.data_ptr())
    assert arena.buffer.contains(served.data_ptr())
    assert arena.counts() == RunCounts(1, 400, 0, 0, 0, 0)
    assert len(arena.recording()) == 1


def test_outside_of_regions_nothing_is_served() -> None:
    arena = two_places()
    with interrupted():
        arena.begin_operator(0)
    assert not in_region()
    assert not arena.buffer.contains(floats(100).data_ptr())


def test_counters_start_anew_with_every_run() -> None:
    arena = two_places()
    for _ in range(2):
        with arena.region():
            arena.begin_operator(0)
            floats(100)
            floats(1)
        assert arena.counts() == RunCounts(1, 400, 0, 1, 4, 0)
        assert len(arena.outside_log()) == 1


def test_poison_fills_the_whole_buffer() -> None:
    arena = Arena(Buffer(800), 1, [PlannedRequest(0, 0, 800, 0)])
    with arena.region():
        arena.begin_operator(0)
        block = floats(200)
    arena.buffer.poison()
    assert torch.isnan(block).all()
    arena.buffer.poison(0)
    assert (block == 0).all()


def test_a_served_block_outlives_its_arena() -> None:
    arena = two_places()
    with arena.region():
        arena.begin_operator(0)
        kept = torch.full((100,), 7.0)
    begin, end = arena.buffer.address, arena.buffer.address + arena.buffer.buffer_bytes
    assert arena.buffer.outstanding_blocks == 1
    del arena
    gc.collect()
    others = [floats(512) for _ in range(64)]
    assert all(not begin <= other.data_ptr() < end for other in others)
    assert (kept == 7.0).all()
    del kept, others
    assert floats(512).numel() == 512


def test_an_arena_is_reusable_after_an_exception_inside() -> None:
    arena = two_places()
    with pytest.raises(KeyError), arena.region(), interrupted():
        raise KeyError("the step failed")
    assert not arena.is_busy
    with arena.region():
        arena.begin_operator(0)
        assert arena.buffer.contains(floats(100).data_ptr())


def test_a_region_can_be_entered_once_at_a_time() -> None:
    arena, other = two_places(), two_places()
    with arena.region():
        assert arena.is_busy
        assert other.is_busy
        with pytest.raises(ArenaBusyError, match="this buffer is already running a step"), arena.region():
            pass
        with pytest.raises(ArenaBusyError, match="another arena"), other.region():
            pass
        arena.begin_operator(0)
        assert arena.buffer.contains(floats(100).data_ptr())
    assert not other.is_busy


def test_two_arenas_take_turns() -> None:
    arenas = two_places(), two_places()
    for turn in range(6):
        arena = arenas[turn % 2]
        with arena.region():
            arena.begin_operator(1)
            assert floats(200).data_ptr() == arena.buffer.address + 512


@pytest.mark.parametrize("record", [False, True])
def test_convolution_scratch_lives_in_the_buffer_and_the_result_is_the_same(record: bool) -> None:
    image, weight = torch.randn(2, 16, 32, 32), torch.randn(32, 16, 3, 3)
    expected = torch.conv2d(image, weight, padding=1)
    recorder = Arena(Buffer(0), 1, [])
    with recorder.region(record=True):
        recorder.begin_operator(0)
        torch.conv2d(image, weight, padding=1)
    sizes = [request.size_bytes for request in recorder.recording()]
    offsets = [sum(-(-size // 64) * 64 for size in sizes[:position]) for position in range(len(sizes))]
    arena = Arena(
        Buffer(offsets[-1] + sizes[-1]),
        1,
        [
            PlannedRequest(0, position, size, offset)
            for position, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        ],
    )
    for _ in range(2):
        arena.buffer.poison()
        with arena.region(record=record):
            arena.begin_operator(0)
            result = torch.conv2d(image, weight, padding=1)
        assert arena.counts() == RunCounts(len(sizes), sum(sizes), 0, 0, 0, 0)
        assert arena.buffer.contains(result.data_ptr())
        assert torch.equal(result, expected)
        del result  # what is alive keeps its place


def test_a_place_whose_block_is_alive_is_not_served() -> None:
    arena = Arena(Buffer(512), 2, [PlannedRequest(0, 0, 400, 0), PlannedRequest(1, 0, 400, 64)])
    with arena.region():
        arena.begin_operator(0)
        alive = torch.ones(100)
        arena.begin_operator(1)
        other = torch.zeros(100)
    assert arena.buffer.contains(alive.data_ptr())
    assert not arena.buffer.contains(other.data_ptr())
    assert torch.equal(alive, torch.ones(100))
    assert arena.counts().outside == 1


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([PlannedRequest(2, 0, 4, 0)], "there are 2 operators"),
        ([PlannedRequest(0, 0, 4, 0), PlannedRequest(0, 0, 4, 64)], "planned twice"),
        ([PlannedRequest(0, 0, 0, 0)], "of 0 B"),
        ([PlannedRequest(0, 0, 4, 128)], r"at \[128, 132\), is not inside the 128 B buffer"),
        ([PlannedRequest(0, 0, 4, 32)], "no multiple of 64"),
    ],
)
def test_programs_that_cannot_be_are_refused(requests: list[PlannedRequest], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arena(Buffer(128), 2, requests)


def test_a_buffer_beyond_all_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot allocate a buffer"):
        Arena(Buffer(2**60), 0, [])


def test_begin_operator_refuses_what_is_no_number() -> None:
    with pytest.raises(TypeError):
        Arena(Buffer(0), 0, []).begin_operator("seventeen")  # type: ignore[arg-type]
