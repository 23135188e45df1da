"""Serves a planned step from one buffer by native allocators, and records what a real step requests."""

from olla_fx.arena.accumulation import shares_storage, taken_gradients
from olla_fx.arena.arena import (
    Arena,
    Buffer,
    PlannedRequest,
    RecordedRequest,
    available,
    in_region,
    interrupted,
)
from olla_fx.arena.counts import Binding, RunCounts
from olla_fx.arena.events import AllocationEvent, EventKind, EventRecording, record_events
from olla_fx.arena.native import (
    LeftGradients,
    NativeModule,
    NativeProgram,
    TakenGradients,
    build_seconds,
    native_module,
)

__all__ = [
    "AllocationEvent",
    "Arena",
    "Binding",
    "Buffer",
    "EventKind",
    "EventRecording",
    "LeftGradients",
    "NativeModule",
    "NativeProgram",
    "PlannedRequest",
    "RecordedRequest",
    "RunCounts",
    "TakenGradients",
    "available",
    "build_seconds",
    "in_region",
    "interrupted",
    "native_module",
    "record_events",
    "shares_storage",
    "taken_gradients",
]
