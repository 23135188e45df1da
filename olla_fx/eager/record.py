"""Computes what a plan would save in a loop that is left as it is.

:func:`record` records the allocator's requests while the caller's own eager loop runs, finds the iteration in
them, and reports what that iteration needs: of PyTorch's caching allocator, and of one buffer in
which every block has a planned address. Nothing is changed, nothing is captured: the order stays eager's, so
:func:`olla_fx.plan`, which also reorders, saves at least as much on a step that it can capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from olla_fx.alignment import alignment_of, rounded
from olla_fx.arena import AllocationEvent, record_events
from olla_fx.eager.accesses import AccessTracker, RecordedProgram
from olla_fx.eager.baseline import Baseline, baseline_from_events
from olla_fx.eager.iterations import find_period, spans_of_iteration
from olla_fx.errors import RecordingError
from olla_fx.report.table import format_bytes, format_table
from olla_solvers.place import place


@dataclass(frozen=True)
class LoopReport:
    """The memory that one iteration of a loop needs.

    Attributes:
        iterations: the number of recorded iterations.
        requests: the number of one iteration's requests.
        baseline: of the whole recording: live bytes, and what the caching allocator would reserve.
        live_peak_bytes: the maximum of bytes of one iteration's own blocks alive at once.
        buffer_bytes: the size of a buffer with planned addresses for them, in eager's order.
    """

    iterations: int
    requests: int
    baseline: Baseline
    live_peak_bytes: int
    buffer_bytes: int

    def __str__(self) -> str:
        """Return a table."""
        return format_table(
            [
                ("iterations seen", f"{self.iterations}"),
                ("requests an iteration", f"{self.requests}"),
                ("live bytes at the peak, eager's order", format_bytes(self.live_peak_bytes)),
                ("caching allocator, reserved (model)", format_bytes(self.baseline.reserved_bytes)),
                ("one buffer, planned addresses", format_bytes(self.buffer_bytes)),
            ]
        )


class Recording:
    """The recording of :func:`record`; complete when its context has ended."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.events: tuple[AllocationEvent, ...] = ()
        self._program: RecordedProgram | None = None

    @property
    def program(self) -> RecordedProgram:
        """The operators that ran, and what each of them accessed.

        Raises:
            RecordingError: if they were not recorded.
        """
        if self._program is None:
            raise RecordingError("operators were not recorded: ask for them by record(operators=True)")
        return self._program

    def report(self, *, time_limit: float | None = None) -> LoopReport:
        """Find the iteration and report what it needs.

        Args:
            time_limit: seconds for placing its blocks.

        Raises:
            RecordingError: if nothing repeats itself.
        """
        period = find_period(self.events)
        if period is None:
            raise RecordingError(
                f"no iteration was found in {len(self.events)} requests and frees: record at least four "
                "steps of the loop, with inputs of one shape"
            )
        alignment_bytes = alignment_of(torch.device("cpu"))
        spans = [
            replace(span, size_bytes=rounded(span.size_bytes, alignment_bytes), alignment=alignment_bytes)
            for span in spans_of_iteration(self.events, period)
        ]
        placement = place(spans, time_limit=time_limit)
        return LoopReport(
            period.repetitions,
            len(spans),
            baseline_from_events(self.events),
            placement.lower_bound_bytes,
            placement.height_bytes,
        )


@contextlib.contextmanager
def record(*, operators: bool = False) -> Iterator[Recording]:
    """Record every thread's requests while the caller's own loop runs.

    Args:
        operators: True to record this thread's operators, too, and what each of them accesses
            (:attr:`Recording.program`): for programs that are planned as they are.

    Yields:
        The recording; call its :meth:`~Recording.report` after the context.

    Raises:
        ArenaUnavailableError: without the native allocator.
        ArenaBusyError: if events are being recorded already.
    """
    recording = Recording()
    tracker = AccessTracker() if operators else None
    with record_events() as recorded, tracker or contextlib.nullcontext():
        yield recording
    recording.events = recorded.events
    if tracker is not None:
        recording._program = tracker.program()
