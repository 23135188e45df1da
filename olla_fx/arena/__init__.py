"""Serves a planned step from one buffer by native allocators, and records what a real step requests."""

from olla_fx.arena.accumulation import Accumulation, accumulation
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
    "Accumulation",
    "AllocationEvent",
    "Arena",
    "Binding",
    "Buffer",
    "EventKind",
    "EventRecording",
    "PlannedRequest",
    "RecordedRequest",
    "RunCounts",
    "accumulation",
    "available",
    "begin_operator_function",
    "build_seconds",
    "in_region",
    "interrupted",
    "record_events",
]
