"""What an eager step's requests cost: served by PyTorch's allocator, and from a planned buffer (OLLA §5.7).

The requests and frees of one step are made again, each with ``torch.empty``, with nothing computed between
them. Python's own cost is the same on both sides, so that the difference is the allocators'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from olla_fx import arena
from olla_fx.arena import AllocationEvent, EventKind
from olla_solvers.placer import place_with

from .traces import spans_of

REPETITIONS = 5

Request = tuple[bool, int, int]
"""Whether it is a free, the block, bytes."""


@dataclass(frozen=True)
class AllocationTimes:
    """Seconds for the requests and frees of one step.

    Attributes:
        requests: how many blocks were requested.
        stock_seconds: by PyTorch's allocator.
        served_seconds: from the planned buffer; None where there is no native allocator.
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
    mine = [each for each in events if each.on_planning_thread and each.size_bytes]
    requests = [(each.kind is EventKind.FREE, each.block, each.size_bytes) for each in mine]
    count = sum(not is_free for is_free, _, _ in requests)
    where = torch.device(device)
    stock = min(_replay(requests, where) for _ in range(REPETITIONS))
    if not arena.available(where):
        return AllocationTimes(count, stock, None)
    program = _program(mine, where)
    return AllocationTimes(count, stock, min(_served(program, requests) for _ in range(REPETITIONS)))


def _program(events: Sequence[AllocationEvent], device: torch.device) -> arena.Arena:
    """A buffer in which every block has its place; its memory is never touched."""
    placement = place_with(spans_of(events, arena.alignment_of(device)), method="birth-first-fit")
    sizes = [each.size_bytes for each in events if each.kind is EventKind.ALLOC]
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


def _served(program: arena.Arena, requests: Sequence[Request]) -> float:
    with program.region():
        program.begin_operator(0)
        seconds = _replay(requests, program.buffer.device)
    if program.counters().outside:
        raise RuntimeError(f"{program.counters().outside} of {len(requests)} requests were not served")
    return seconds
