"""Writes a plan as a memory snapshot, in the file format of ``torch.cuda.memory._dump_snapshot``.

PyTorch's memory viewer replays a list of allocations and frees inside one segment. For a planned step the
segment is the buffer, in which every array is allocated and freed at its offset.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from olla_fx.report.spans import placed_spans
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem

_BUFFER_ADDRESS = 1 << 30


def write_snapshot(problem: Problem, plan: MemoryPlan, path: str | Path) -> None:
    """Write a planned step as a snapshot file.

    Args:
        problem: the operators and arrays.
        plan: their order and offsets.
        path: of the pickle file.
    """
    Path(path).write_bytes(pickle.dumps(_snapshot(problem, plan)))


def _snapshot(problem: Problem, plan: MemoryPlan) -> dict[str, Any]:
    events: list[tuple[int, int, dict[str, Any]]] = []
    for span, offset in placed_spans(problem, plan):
        if span.size_bytes:
            address = _BUFFER_ADDRESS + offset
            frames = [{"filename": plan.order[span.lower], "line": span.lower, "name": span.name}]
            # Frees of a timestep come before its allocations: lifetimes are half open.
            events.append((span.lower, 1, _event("alloc", address, span.size_bytes, frames)))
            events.append((span.upper, 0, _event("free_requested", address, span.size_bytes, frames)))
            events.append((span.upper, 0, _event("free_completed", address, span.size_bytes, frames)))
    trace = [_event("segment_alloc", _BUFFER_ADDRESS, plan.buffer_bytes, [])]
    trace += [event for _, _, event in sorted(events, key=lambda event: event[:2])]
    segment = {
        "device": 0,
        "address": _BUFFER_ADDRESS,
        "total_size": plan.buffer_bytes,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {"address": _BUFFER_ADDRESS, "size": plan.buffer_bytes, "requested_size": 0, "state": "inactive",
             "frames": []}
        ],
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}


def _event(action: str, address: int, size_bytes: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size_bytes,
        "stream": 0,
        "frames": frames,
        "time_us": 0,
    }
