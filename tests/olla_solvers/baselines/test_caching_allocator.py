"""The model of the CUDA caching allocator against cases worked out by hand, and its invariants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.baselines.caching_allocator import MIB, CachingAllocatorModel, round_up


def test_small_requests_share_a_segment_of_2_mib() -> None:
    model = CachingAllocatorModel()
    assert [model.allocate(0, 1), model.allocate(1, 513), model.allocate(2, MIB)] == [0, 512, 1536]
    assert model.allocated_bytes == 512 + 1024 + MIB
    assert model.reserved_bytes == 2 * MIB
    assert model.free_blocks == ((1536 + MIB, MIB - 1536),)


def test_medium_requests_share_a_segment_of_20_mib() -> None:
    model = CachingAllocatorModel()
    model.allocate(0, MIB + 1)
    model.allocate(1, 10 * MIB - 512)
    assert model.reserved_bytes == 20 * MIB
    assert model.allocated_bytes == MIB + 512 + 10 * MIB - 512


@pytest.mark.parametrize(("asked", "segment"), [(10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB)])
def test_large_requests_get_a_segment_of_their_own(asked: int, segment: int) -> None:
    model = CachingAllocatorModel()
    model.allocate(0, asked)
    assert model.reserved_bytes == segment


def test_a_large_block_is_split_only_if_more_than_1_mib_remains() -> None:
    model = CachingAllocatorModel()
    model.allocate(0, 20 * MIB)
    model.free(0)
    model.allocate(1, 19 * MIB)
    assert model.allocated_bytes == 20 * MIB  # used whole
    model.free(1)
    model.allocate(2, 19 * MIB - 512)
    assert model.allocated_bytes == 19 * MIB - 512


def test_a_small_block_is_split_if_512_b_remain() -> None:
    model = CachingAllocatorModel()
    model.allocate(0, MIB)
    model.allocate(1, MIB - 512)
    assert model.free_blocks == ((2 * MIB - 512, 512),)


def test_the_smallest_sufficient_block_serves_and_the_lowest_among_equals() -> None:
    model = CachingAllocatorModel()
    addresses = [model.allocate(block, size) for block, size in enumerate((4096, 512, 1024, 512, 1024, 512))]
    for block in (0, 2, 4):
        model.free(block)
    assert model.allocate(10, 1024) == addresses[2]
    assert model.allocate(11, 1024) == addresses[4]
    assert model.allocate(12, 1024) == addresses[0]


def test_a_freed_block_merges_with_both_neighbours() -> None:
    model = CachingAllocatorModel()
    for block in range(4):
        model.allocate(block, 512)
    for block in (0, 2, 1):
        model.free(block)
    assert model.free_blocks == ((0, 1536), (2048, 2 * MIB - 2048))
    model.free(3)
    assert model.free_blocks == ((0, 2 * MIB),)


def test_fragmentation_is_taken_when_the_last_segment_is_reserved() -> None:
    model = CachingAllocatorModel()
    model.allocate(0, 12 * MIB)
    model.allocate(1, 10 * MIB)
    model.free(0)
    model.allocate(2, 14 * MIB)  # 12 MiB are free, and too few
    assert model.reserved_bytes == 36 * MIB
    assert model.fragmentation == pytest.approx(12 / 36)
    model.allocate(3, 12 * MIB)
    assert model.fragmentation == pytest.approx(12 / 36)
    assert model.allocated_peak_bytes == 36 * MIB


def test_requests_of_nothing_take_nothing_and_strange_frees_are_ignored() -> None:
    model = CachingAllocatorModel()
    model.allocate(0, 0)
    model.free(0)
    model.free(99)
    assert (model.reserved_bytes, model.fragmentation) == (0, 0.0)


def test_impossible_requests_are_refused() -> None:
    model = CachingAllocatorModel()
    model.allocate(0, 1)
    with pytest.raises(ValueError, match="requested again"):
        model.allocate(0, 1)
    with pytest.raises(ValueError, match="negative"):
        model.allocate(1, -1)


@given(st.lists(st.tuples(st.integers(0, 25 * MIB), st.integers(0, 3)), max_size=60), st.randoms())
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_everything_merges_in_the_end(
    requests: list[tuple[int, int]], chooser: random.Random
) -> None:
    model = CachingAllocatorModel()
    live: dict[int, tuple[int, int]] = {}
    for block, (size, scale) in enumerate(requests):
        asked = size >> (4 * scale)
        begin = model.allocate(block, asked)
        end = begin + round_up(asked, 512)
        assert all(end <= other_begin or other_end <= begin for other_begin, other_end in live.values())
        live[block] = (begin, end)
        assert model.allocated_bytes <= model.reserved_bytes
        if chooser.random() < 0.5:
            gone = chooser.choice(sorted(live))
            model.free(gone)
            del live[gone]
    for block in live:
        model.free(block)
    assert model.allocated_bytes == 0
    assert 0 <= model.fragmentation < 1
    free = model.free_blocks
    assert sum(size for _, size in free) == model.reserved_bytes
    segments = {size for _, size in free}
    assert all(size % (2 * MIB) == 0 for size in segments)
