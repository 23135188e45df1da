"""What copies between device and host beside computing, one array after the other in each direction.

On CUDA a stream for each direction: it begins when what computes has come as far as the step had when the
copy was asked for, and a wait lets the computing stream wait for the copy, so that memory is reused in the
sequence of the step, on either side. The host waits for nothing.

On a CPU a thread for each direction, whose copies may be slowed down to the speed of a
:class:`~olla_solvers.swapping.transfers.Link`: a piece of the array is there when the link would have brought
it, not earlier. The memory on both sides is the same machine's, so that nothing is gained; it is there so
that all else can be run and tested.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import torch

from olla_solvers.swapping.transfers import Link

_PIECE_BYTES = 1 << 18
"""Copied at once by a thread that keeps to the speed of a link."""

Seconds: TypeAlias = float


class CopyUnderWay(Protocol):
    """One copy that was asked for; what it is depends on the engines."""


class CopyEngines(Protocol):
    """Copies bytes out and in; a copy keeps both sides alive."""

    def begin_out(self, source: torch.Tensor, target: torch.Tensor) -> CopyUnderWay:
        """Begin to copy from the device to the host."""
        ...

    def begin_in(self, source: torch.Tensor, target: torch.Tensor) -> CopyUnderWay:
        """Begin to copy from the host to the device."""
        ...

    def wait(self, copy: CopyUnderWay) -> Seconds:
        """Let what computes wait for a copy, any number of times; return for how long the host waited."""
        ...

    def drain(self, copies: Iterable[CopyUnderWay]) -> None:
        """Wait for copies of a run that is over, or was given up."""
        ...


def engines_for(device: torch.device, link: Link) -> CopyEngines:
    """Return engines for a device.

    Args:
        device: on one side.
        link: to whose speed a CPU's threads keep; a CUDA device has its own.
    """
    return _Streams(device) if device.type == "cuda" else _Threads(link)


class _Threads:
    """Copies on a CPU."""

    def __init__(self, link: Link) -> None:
        self._out = _CopyingThread("olla_fx copies out", link.out_seconds)
        self._in = _CopyingThread("olla_fx copies in", link.in_seconds)

    def begin_out(self, source: torch.Tensor, target: torch.Tensor) -> _ThreadsCopy:
        return self._out.begin(source, target)

    def begin_in(self, source: torch.Tensor, target: torch.Tensor) -> _ThreadsCopy:
        return self._in.begin(source, target)

    def wait(self, copy: CopyUnderWay) -> Seconds:
        return _of_threads(copy).wait()

    def drain(self, copies: Iterable[CopyUnderWay]) -> None:
        for copy in copies:
            _of_threads(copy).done.wait()  # whoever needs its result has waited, and heard of its error


def _of_threads(copy: CopyUnderWay) -> _ThreadsCopy:
    if not isinstance(copy, _ThreadsCopy):
        raise TypeError(f"{copy!r} is no copy of this engine")
    return copy


class _ThreadsCopy:
    """One copy of a thread.

    Attributes:
        asked_at: when it was asked for.
        done: set when it is over; it keeps neither side alive from then on.
        error: why it failed, if it did.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.asked_at = time.perf_counter()
        self.done = threading.Event()
        self.error: Exception | None = None
        self._sides: tuple[torch.Tensor, torch.Tensor] | None = (source, target)
        self.size_bytes = source.numel()

    def wait(self) -> Seconds:
        if not self.done.is_set():
            began = time.perf_counter()
            self.done.wait()
            waited = time.perf_counter() - began
        else:
            waited = 0.0
        if self.error is not None:
            raise self.error
        return waited

    def run(self, begins_at: float, seconds: Seconds) -> None:
        """Copy, so that each piece is there when a link would have brought it."""
        try:
            if self._sides is not None:
                source, target = (side.data_ptr() for side in self._sides)
                _copy_at_speed(source, target, self.size_bytes, begins_at, seconds)
        except Exception as error:
            self.error = error
        finally:
            # Before it is known to be done: whoever waits for it frees the memory.
            self._sides = None
            self.done.set()


def _copy_at_speed(source: int, target: int, size_bytes: int, begins_at: float, seconds: Seconds) -> None:
    for start in range(0, size_bytes, _PIECE_BYTES):
        end = min(start + _PIECE_BYTES, size_bytes)
        early = begins_at + seconds * end / size_bytes - time.perf_counter()
        if early > 0:
            time.sleep(early)
        ctypes.memmove(target + start, source + start, end - start)


class _CopyingThread:
    """One direction: a thread that starts with the first copy, and ends when this object is gone."""

    def __init__(self, name: str, seconds_of: Callable[[int], Seconds]) -> None:
        self._name = name
        self._seconds_of = seconds_of
        self._copies: queue.SimpleQueue[_ThreadsCopy | None] = queue.SimpleQueue()
        self._is_started = False

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> _ThreadsCopy:
        if not self._is_started:
            arguments = self._copies, self._seconds_of
            threading.Thread(target=_copy_all, args=arguments, name=self._name, daemon=True).start()
            weakref.finalize(self, self._copies.put, None)
            self._is_started = True
        copy = _ThreadsCopy(source, target)
        self._copies.put(copy)
        return copy


def _copy_all(copies: queue.SimpleQueue[_ThreadsCopy | None], seconds_of: Callable[[int], Seconds]) -> None:
    """Copy what comes, each when it was asked for or, if that is later, when the one before is done."""
    free_at = 0.0
    while (copy := copies.get()) is not None:
        # By the link's time: a thread that was late, since other programs run, catches up.
        begins_at, seconds = max(copy.asked_at, free_at), seconds_of(copy.size_bytes)
        copy.run(begins_at, seconds)
        free_at = begins_at + seconds


class _Streams:
    """Copies on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin_out(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        return self._begin(self._out, source, target)

    def begin_in(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        return self._begin(self._in, source, target)

    def _begin(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor
    ) -> torch.cuda.Event:
        # What it copies is made, and what it overwrites was read, by what was asked for before it.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, copy: CopyUnderWay) -> Seconds:
        if not isinstance(copy, torch.cuda.Event):
            raise TypeError(f"{copy!r} is no copy of this engine")
        torch.cuda.current_stream(self._device).wait_event(copy)
        return 0.0

    def drain(self, copies: Iterable[CopyUnderWay]) -> None:
        # What a run leaves is used again by what computes, after the last copy.
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._out)
        computing.wait_stream(self._in)
