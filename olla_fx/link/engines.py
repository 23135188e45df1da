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
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from olla_solvers.swapping.transfers import Link

_PIECE_BYTES = 1 << 18
"""Copied at once by a thread that keeps to the speed of a link."""

_threads = threading.local()

Seconds: TypeAlias = float


class CopyUnderWay(Protocol):
    """One copy that was asked for. It keeps both sides alive until it was waited for."""

    def wait(self) -> Seconds:
        """Let what computes wait for it, any number of times; return for how long the host waited."""
        ...

    def drain(self) -> bool:
        """Wait until it uses neither side; what it brings is not needed, so that it may stop half way.

        Returns:
            False if it goes on, since nobody can wait for it here.
        """
        ...


class CopyEngines(Protocol):
    """Copies bytes out and in."""

    def begin_out(self, source: torch.Tensor, target: torch.Tensor) -> CopyUnderWay:
        """Begin to copy from the device to the host."""
        ...

    def begin_in(self, source: torch.Tensor, target: torch.Tensor) -> CopyUnderWay:
        """Begin to copy from the host to the device."""
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


class _ThreadsCopy:
    """One copy of a thread.

    Attributes:
        asked_at: when it was asked for.
        done: set when it is over; it keeps neither side alive from then on.
        size_bytes: to copy.
        error: why it failed, if it did.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.asked_at = time.perf_counter()
        self._process = os.getpid()
        self.done = threading.Event()
        self.error: Exception | None = None
        self.size_bytes = source.numel()
        self._is_given_up = threading.Event()
        self._sides: tuple[torch.Tensor, torch.Tensor] | None = (source, target)

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

    def drain(self) -> bool:
        # The collector of garbage may ask for it anywhere: on a thread that copies, which would wait for
        # itself, or in a forked process, which has no such thread.
        if not getattr(_threads, "copies", False) and self._process == os.getpid():
            self._is_given_up.set()
            self.done.wait()
        return self.done.is_set()

    def run(self, begins_at: float, seconds: Seconds) -> float:
        """Copy, so that each piece is there when a link would have brought it; return when that is free."""
        try:
            if self._sides is not None:
                source, target = (side.data_ptr() for side in self._sides)
                _copy_at_speed(source, target, self.size_bytes, begins_at, seconds, self._is_given_up)
        except Exception as error:
            self.error = error
        finally:
            # Before it is known to be done: whoever waits for it frees the memory.
            self._sides = None
            self.done.set()
        ends_at = begins_at + seconds
        return min(ends_at, time.perf_counter()) if self._is_given_up.is_set() else ends_at


def _copy_at_speed(
    source: int,
    target: int,
    size_bytes: int,
    begins_at: float,
    seconds: Seconds,
    is_given_up: threading.Event,
) -> None:
    for start in range(0, size_bytes, _PIECE_BYTES):
        end = min(start + _PIECE_BYTES, size_bytes)
        early = begins_at + seconds * end / size_bytes - time.perf_counter()
        if is_given_up.wait(early) if early > 0 else is_given_up.is_set():
            return
        ctypes.memmove(target + start, source + start, end - start)


class _CopyingThread:
    """One direction: a thread that starts with the first copy, and ends when this object is gone."""

    def __init__(self, name: str, seconds_of: Callable[[int], Seconds]) -> None:
        self._name = name
        self._seconds_of = seconds_of
        self._copies: queue.SimpleQueue[_ThreadsCopy | None] = queue.SimpleQueue()
        self._process: int | None = None

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> _ThreadsCopy:
        if self._process != os.getpid():  # a forked process has the object without the thread
            self._process, self._copies = os.getpid(), queue.SimpleQueue()
            arguments = self._copies, self._seconds_of
            threading.Thread(target=_copy_all, args=arguments, name=self._name, daemon=True).start()
            weakref.finalize(self, self._copies.put, None)
        copy = _ThreadsCopy(source, target)
        self._copies.put(copy)
        return copy


def _copy_all(copies: queue.SimpleQueue[_ThreadsCopy | None], seconds_of: Callable[[int], Seconds]) -> None:
    """Copy what comes, each when it was asked for or, if that is later, when the one before is done."""
    _threads.copies = True
    free_at = 0.0
    while (copy := copies.get()) is not None:
        # By the link's time: a thread that was late, since other programs run, catches up.
        begins_at, seconds = max(copy.asked_at, free_at), seconds_of(copy.size_bytes)
        free_at = copy.run(begins_at, seconds)


class _Streams:
    """Copies on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin_out(self, source: torch.Tensor, target: torch.Tensor) -> _StreamsCopy:
        return self._begin(self._out, source, target)

    def begin_in(self, source: torch.Tensor, target: torch.Tensor) -> _StreamsCopy:
        return self._begin(self._in, source, target)

    def _begin(self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor) -> _StreamsCopy:
        # What it copies is made, and what it overwrites was read, by what was asked for before it.
        computing = torch.cuda.current_stream(self._device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return _StreamsCopy(event, computing, source, target)


class _StreamsCopy:
    """One copy of a stream; whoever uses the memory of its sides next does so behind it."""

    def __init__(
        self,
        event: torch.cuda.Event,
        computing: torch.cuda.Stream,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        self._event = event
        self._computing = computing
        self._sides: tuple[torch.Tensor, torch.Tensor] | None = (source, target)

    def wait(self) -> Seconds:
        self._computing.wait_event(self._event)
        self._sides = None
        return 0.0

    def drain(self) -> bool:
        # The collector of garbage may ask for it, on any thread: the stream is that of the step.
        if self._sides is not None:
            self.wait()
        return True
