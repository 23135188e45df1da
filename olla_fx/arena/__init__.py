"""The native allocator: serves a planned step from one buffer, and records what a real step requests."""

from olla_fx.arena.build import build_seconds
from olla_fx.arena.cpu import (
    ALIGNMENT_BYTES,
    ArenaBusyError,
    ArenaUnavailableError,
    Counters,
    CpuArena,
    CpuBuffer,
    PlannedRequest,
    RecordedRequest,
    available,
    begin_operator_function,
    in_region,
    interrupted,
)
from olla_fx.arena.events import AllocationEvent, EventKind, EventRecording, record_events

__all__ = [
    "ALIGNMENT_BYTES",
    "AllocationEvent",
    "ArenaBusyError",
    "ArenaUnavailableError",
    "Counters",
    "CpuArena",
    "CpuBuffer",
    "EventKind",
    "EventRecording",
    "PlannedRequest",
    "RecordedRequest",
    "available",
    "begin_operator_function",
    "build_seconds",
    "in_region",
    "interrupted",
    "record_events",
]
