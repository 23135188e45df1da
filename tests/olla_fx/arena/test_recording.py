"""A recorded run tells the requests and their lifetimes."""

from __future__ import annotations

import torch

from olla_fx.arena import Arena, Buffer, PlannedRequest


def test_lifetimes_follow_requests_and_frees() -> None:
    arena = Arena(Buffer(0), 3, [])
    with arena.region(record=True):
        arena.begin_operator(0)
        first = torch.empty(100)
        arena.begin_operator(1)
        torch.empty(10)
        kept = torch.empty(200)
        del first
        arena.begin_operator(2)
    requests = arena.recording()
    assert [(request.operator, request.ordinal, request.size_bytes) for request in requests] == [
        (0, 0, 400),
        (1, 0, 40),
        (1, 1, 800),
    ]
    assert [(request.allocated_at, request.freed_at, request.freed_in_operator) for request in requests] == [
        (0, 4, 1),
        (1, 2, 1),
        (3, None, None),
    ]
    assert requests[2].address == kept.data_ptr()
    assert not any(request.served or request.freed_by_other_thread for request in requests)


def test_a_served_run_is_recorded_too() -> None:
    arena = Arena(Buffer(1024), 2, [PlannedRequest(0, 0, 400, 64)])
    with arena.region(record=True):
        arena.begin_operator(0)
        torch.empty(100)
        arena.begin_operator(1)
        torch.empty(100)
    served, other = arena.recording()
    assert served.served
    assert served.address == arena.buffer.address + 64
    assert not other.served
    assert served.freed_in_operator == 0
    assert other.freed_in_operator == 1


def test_an_address_that_is_used_again_belongs_to_several_blocks() -> None:
    arena = Arena(Buffer(0), 100, [])
    with arena.region(record=True):
        for operator in range(100):
            arena.begin_operator(operator)
            torch.empty(3000)
    requests = arena.recording()
    assert len(requests) == 100
    assert len({request.address for request in requests}) < 100
    assert all(request.freed_in_operator == request.operator for request in requests)


def test_blocks_from_before_the_run_are_ignored() -> None:
    arena = Arena(Buffer(0), 1, [])
    with arena.region(record=True):
        arena.begin_operator(0)
        old = torch.empty(100)
    with arena.region(record=True):
        arena.begin_operator(0)
        del old
    assert arena.recording() == ()


def test_a_run_that_is_not_recorded_leaves_no_recording() -> None:
    arena = Arena(Buffer(0), 1, [])
    for record, expected in ((True, 1), (False, 0)):
        with arena.region(record=record):
            arena.begin_operator(0)
            torch.empty(100)
        assert len(arena.recording()) == expected


def test_convolution_scratch_is_recorded_with_its_free() -> None:
    arena = Arena(Buffer(0), 1, [])
    image, weight = torch.randn(1, 16, 56, 56), torch.randn(32, 16, 3, 3)
    with arena.region(record=True):
        arena.begin_operator(0)
        result = torch.conv2d(image, weight, padding=1)
    alive = [request for request in arena.recording() if request.freed_at is None]
    assert result.untyped_storage().data_ptr() in {request.address for request in alive}
    assert len(arena.recording()) > 1
