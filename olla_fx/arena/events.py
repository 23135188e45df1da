"""Records what every thread requests and frees, for instance in one eager step."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from olla_fx.arena.native import native_module
from olla_fx.errors import ArenaBusyError, ArenaUnavailableError


class EventKind(enum.StrEnum):
    """The kinds of events in a block's life."""

    ALLOC = "alloc"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """A request or a free.

    Attributes:
        kind: a request or a free.
        block: identifies the block: the number of earlier requests. Unlike an address, never used twice.
        size_bytes: exactly what was requested, also of a free.
        on_planning_thread: True if requested by the thread that started the recording.
        served: True if the block came from a planned step's buffer, not from the stock allocator.
    """

    kind: EventKind
    block: int
    size_bytes: int
    on_planning_thread: bool
    served: bool = False


class EventRecording:
    """The recording of :func:`record_events`; complete when its context has ended.

    Attributes:
        events: requests and frees in order; frees of blocks from before the recording are left out.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.events: tuple[AllocationEvent, ...] = ()


@contextlib.contextmanager
def record_events() -> Iterator[EventRecording]:
    """Record every thread's requests and frees while the context lasts.

    Raises:
        ArenaUnavailableError: without the native allocator.
        ArenaBusyError: if events are being recorded already, in any thread.
    """
    native = native_module()
    if native is None:
        raise ArenaUnavailableError("events cannot be recorded: there is no native allocator in this process")
    if not native.start_events():
        raise ArenaBusyError("events are being recorded already, and there can be only one recording")
    recording = EventRecording()
    try:
        yield recording
    finally:
        recording.events = tuple(_event(*row) for row in native.stop_events())


def _event(
    is_free: bool, block: int, size_bytes: int, on_planning_thread: bool, served: bool
) -> AllocationEvent:
    kind = EventKind.FREE if is_free else EventKind.ALLOC
    return AllocationEvent(kind, block, size_bytes, on_planning_thread, served)
