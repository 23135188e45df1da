"""Times an eager step's requests: served by PyTorch's allocator, and from a planned buffer (OLLA §5.7).

The requests and frees of one step are made again, each with ``torch.empty``, with nothing computed between
them. Python's own cost is the same on both sides, so that the difference is the allocators'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from olla_fx import arena
from olla_fx.alignment import alignment_of
from olla_fx.arena import AllocationEvent, EventKind
from olla_solvers.placer import place_with

from .traces import spans_of

REPETITIONS = 5

Request = tuple[bool, int, int]
"""True for a free, the block, bytes."""


@dataclass(frozen=True)
class AllocationTimes:
    """Seconds for the requests and frees of one step.

    Attributes:
        requests: how many blocks were requested.
        stock_seconds: by PyTorch's allocator.
        served_seconds: from the planned buffer; None if there is no native allocator.
    """

    requests: int
    stock_seconds: float
    served_seconds: float | None


def allocation_times(events: Sequence[AllocationEvent], device: str) -> AllocationTimes:
    """Make a step's requests again, both ways; the fastest of some repetitions.

    Args:
        events: a step's requests and frees; those of kernels' own threads are left out, as no plan serves
            them.
        device: whose allocator.
    """
    own_events = [event for event in events if event.on_planning_thread and event.size_bytes]
    requests = [(event.kind is EventKind.FREE, event.block, event.size_bytes) for event in own_events]
    count = sum(not is_free for is_free, _, _ in requests)
    torch_device = torch.device(device)
    stock = min(_replay(requests, torch_device) for _ in range(REPETITIONS))
    if not arena.available(torch_device):
        return AllocationTimes(count, stock, None)
    planned_arena = _planned_arena(own_events, torch_device)
    return AllocationTimes(count, stock, min(_served(planned_arena, requests) for _ in range(REPETITIONS)))


def _planned_arena(events: Sequence[AllocationEvent], device: torch.device) -> arena.Arena:
    """Make an arena in which every block has its place; its memory is never touched."""
    placement = place_with(spans_of(events, alignment_of(device)), method="birth-first-fit")
    sizes = [event.size_bytes for event in events if event.kind is EventKind.ALLOC]
    planned = [
        arena.PlannedRequest(0, ordinal, size, offset)
        for ordinal, (size, offset) in enumerate(zip(sizes, placement.offsets, strict=True))
    ]
    return arena.Arena(arena.Buffer(placement.height_bytes, device), 1, planned)


def _replay(requests: Sequence[Request], device: torch.device) -> float:
    live: dict[int, torch.Tensor] = {}
    empty: Callable[..., torch.Tensor] = torch.empty
    started = time.perf_counter()
    for is_free, block, size_bytes in requests:
        if is_free:
            del live[block]
        else:
            live[block] = empty(size_bytes, dtype=torch.uint8, device=device)
    seconds = time.perf_counter() - started
    live.clear()
    return seconds


def _served(planned_arena: arena.Arena, requests: Sequence[Request]) -> float:
    with planned_arena.region():
        planned_arena.begin_operator(0)
        seconds = _replay(requests, planned_arena.buffer.device)
    if planned_arena.counts().outside:
        raise RuntimeError(f"{planned_arena.counts().outside} of {len(requests)} requests were not served")
    return seconds
