from __future__ import annotations

import pytest

from olla_fx.arena import AllocationEvent, EventKind
from olla_fx.eager.baseline import baseline_from_events
from olla_fx.eager.recorded_cuda import resident_at_peak
from olla_solvers.baselines.caching_allocator import MIB, CachingAllocatorModel

GROWTH = [("segment_alloc", 20), ("alloc", 4), ("alloc", 6)]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], None),
        ([("alloc", 5), ("free_requested", 5), ("free_completed", 5)], None),
        (GROWTH, 104),
        ([*GROWTH, ("free_requested", 4), ("segment_alloc", 8), ("alloc", 8), ("free_requested", 8)], 114),
        # What was given back and taken again is no new peak.
        ([*GROWTH, ("segment_free", 20), ("segment_alloc", 20), ("alloc", 7)], 104),
        ([("segment_map", 2), ("segment_map", 2), ("alloc", 3)], 103),
    ],
)
def test_resident_bytes_when_the_reserved_bytes_reach_their_peak(
    history: list[tuple[str, int]], expected: int | None
) -> None:
    assert resident_at_peak(history, allocated_bytes=100, reserved_bytes=200) == expected


def test_it_is_what_the_model_of_the_allocator_says() -> None:
    sizes = [3 * MIB, 12 * MIB, MIB // 2, 30 * MIB, 5 * MIB]
    model, history = CachingAllocatorModel(), []
    events = []
    for block, size in enumerate(sizes):
        before = model.reserved_bytes
        model.allocate(block, size)
        events.append(AllocationEvent(EventKind.ALLOC, block, size, True))
        if model.reserved_bytes > before:
            history.append(("segment_alloc", model.reserved_bytes - before))
        history.append(("alloc", size))
        if block % 2:
            model.free(block)
            events.append(AllocationEvent(EventKind.FREE, block, size, True))
            history.append(("free_requested", size))
    resident = resident_at_peak(history, 0, 0)
    assert resident == model.allocated_at_reserved_peak_bytes
    baseline = baseline_from_events(events)
    assert baseline.fragmentation == 1 - resident / baseline.reserved_bytes
