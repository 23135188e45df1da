"""Serves a planned step from one buffer by native allocators, and records what a real step requests."""

from olla_fx.arena.accumulation import accumulate, accumulates_alone, shares_storage, storage_address
from olla_fx.arena.arena import (
    Arena,
    Buffer,
    PlannedRequest,
    RecordedRequest,
    available,
    begin_operator_function,
    in_region,
    interrupted,
)
from olla_fx.arena.counts import Binding, RunCounts
from olla_fx.arena.events import AllocationEvent, EventKind, EventRecording, record_events
from olla_fx.arena.native import build_seconds

__all__ = [
    "AllocationEvent",
    "Arena",
    "Binding",
    "Buffer",
    "EventKind",
    "EventRecording",
    "PlannedRequest",
    "RecordedRequest",
    "RunCounts",
    "accumulate",
    "accumulates_alone",
    "available",
    "begin_operator_function",
    "build_seconds",
    "in_region",
    "interrupted",
    "record_events",
    "shares_storage",
    "storage_address",
]
