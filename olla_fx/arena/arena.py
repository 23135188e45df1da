"""Serves steps' requests from a buffer on a device, by allocation tables.

This is OLLA §3.5 on the device's own allocator: inside a region, the requests of the thread that entered it
get the addresses that were planned; a request that was not planned goes to PyTorch's own allocator and is
counted. Recording follows "Profile-guided memory optimization" §4.1, interrupting §4.3.

Requests of zero bytes are invisible here: they are neither counted nor recorded and have no ordinal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from olla_fx.alignment import alignment_of
from olla_fx.arena.counts import RunCounts
from olla_fx.arena.native import NativeModule, loaded_modules, native_module
from olla_fx.errors import ArenaBusyError, ArenaUnavailableError

CPU = torch.device("cpu")

_Result = TypeVar("_Result")

_OUTSIDE_ON_PURPOSE = -1  # kOutsideOnPurpose of cursor.h


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that is expected of an operator.

    Attributes:
        operator: position in the emitted order.
        ordinal: position among this operator's requests on the planning thread, from 0.
        size_bytes: exactly what is requested, not rounded up.
        offset: in the buffer; None if it is served outside on purpose (an output).
    """

    operator: int
    ordinal: int
    size_bytes: int
    offset: int | None


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request that the planning thread made in a recorded run.

    Times are readings of one clock that every recorded request and free advances.

    Attributes:
        operator: the operator that was running; -1 before the first.
        ordinal: position among this operator's requests, from 0.
        size_bytes: exactly what was requested.
        address: of the block.
        allocated_at: time of the request.
        freed_at: time of the free; None if the block was alive when the run ended.
        freed_in_operator: the operator that was running when the block was freed.
        freed_by_other_thread: True if another thread freed it, at an uncertain point of that operator.
        served: True if it came from the buffer.
    """

    operator: int
    ordinal: int
    size_bytes: int
    address: int
    allocated_at: int
    freed_at: int | None
    freed_in_operator: int | None
    freed_by_other_thread: bool
    served: bool


class Buffer:
    """One block of a device's memory that any number of arenas use, one at a time.

    Attributes:
        buffer_bytes: its size.
        device: the device that it is on.
        address: its first; 0 if it is empty.

    Raises:
        ArenaUnavailableError: without the native allocator; ask :func:`available` first.
        MemoryError: if it cannot be allocated.
    """

    def __init__(self, buffer_bytes: int, device: torch.device = CPU) -> None:
        """Allocate the buffer."""
        if buffer_bytes < 0:
            raise ValueError(f"a buffer of {buffer_bytes} B cannot be")
        index = -1 if device.index is None else device.index
        self.memory = _require_native(device).Memory(buffer_bytes, index)
        self.buffer_bytes = buffer_bytes
        self.device = device
        self.address = self.memory.address

    def poison(self, byte: int = 0xFF) -> None:
        """Fill the buffer, to expose reads of what was not written. 0xFF makes NaNs of floats."""
        self.memory.poison(byte)

    def contains(self, address: int) -> bool:
        """Return True if an address lies in the buffer."""
        return self.address <= address < self.address + self.buffer_bytes

    @property
    def outstanding_blocks(self) -> int:
        """The number of blocks served, in any run, and not yet freed; they keep the buffer's memory."""
        return self.memory.outstanding


class Arena:
    """One allocation table in a buffer.

    Attributes:
        begin_operator: tells the region of the calling thread which operator runs next; does nothing
            outside of regions and while interrupted. One C function, the same in every arena.
        buffer: serves the requests.

    Raises:
        ArenaUnavailableError: without the native allocator; ask :func:`available` first.
        ValueError: if a request is not planned inside the buffer, is misaligned, or planned twice.
    """

    begin_operator: Callable[[int], None]

    def __init__(
        self, buffer: Buffer, operator_count: int, requests: Sequence[PlannedRequest], base: int = 0
    ) -> None:
        """Put an allocation table into a buffer.

        Args:
            buffer: serves the requests.
            operator_count: of the step.
            requests: with offsets from ``base`` on.
            base: bytes of the buffer before the first one that is planned.
        """
        _check_table(buffer, operator_count, requests, base)
        native = self._native = _require_native(buffer.device)
        rows = [
            (
                request.operator,
                request.ordinal,
                request.size_bytes,
                _OUTSIDE_ON_PURPOSE if request.offset is None else base + request.offset,
            )
            for request in requests
        ]
        self._arena = native.Arena(buffer.memory, operator_count, rows)
        self.begin_operator = native.begin_operator
        self.buffer = buffer

    @contextlib.contextmanager
    def region(self, *, record: bool = False) -> Iterator[Arena]:
        """Serve this thread's requests from the buffer while the context lasts.

        Args:
            record: keep what is requested and freed, for :meth:`recording`.

        A request never gets bytes of a served block that is still alive, so that no order of requests and no
        lifetime can harm a result.

        Raises:
            ArenaBusyError: if the buffer is in use, or this thread runs in another arena.
        """
        self._enter(record=record)
        try:
            yield self
        finally:
            self._exit()

    def run(self, function: Callable[..., _Result], arguments: Sequence[Any]) -> _Result:
        """Call a function in a :meth:`region`, whose context costs as much as some operators.

        Args:
            function: to call.
            arguments: its own.

        Raises:
            ArenaBusyError: as :meth:`region`.
        """
        self._enter(record=False)
        try:
            return function(*arguments)
        finally:
            self._exit()

    def _enter(self, *, record: bool) -> None:
        if not self._arena.enter(record):
            raise ArenaBusyError(
                "this buffer is already running a step, and can hold only one"
                if self.buffer.memory.is_busy
                else "this thread is already running a step in another arena"
            )

    def _exit(self) -> None:
        if not self._arena.exit():
            raise RuntimeError("a region must be left by the thread that entered it")

    @property
    def is_busy(self) -> bool:
        """True if :meth:`region` would refuse this thread now."""
        return self.buffer.memory.is_busy or self._native.in_region()

    def counts(self) -> RunCounts:
        """Return the counts of the last run, or of the one under way."""
        return RunCounts(*self._arena.counters())

    def recording(self) -> tuple[RecordedRequest, ...]:
        """Return the requests of the last run, in order; none if it was not recorded or has not ended."""
        return tuple(RecordedRequest(*row) for row in self._arena.recording())

    def outside_log(self) -> tuple[tuple[int, int, int], ...]:
        """Return (operator, ordinal, bytes) of the last run's first 256 requests that were not planned."""
        return tuple(self._arena.outside_log())


def available(device: torch.device = CPU) -> bool:
    """Return True if a device's native allocator can be used; builds it on the first call."""
    return native_module(device.type) is not None


def in_region() -> bool:
    """Return True if the calling thread is in a region of any arena."""
    return any(native.in_region() for native in loaded_modules())


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Leave this thread's requests to the stock allocator while the context lasts.

    They are not counted, not recorded, and do not move the ordinal; ``begin_operator`` does nothing
    meanwhile, so that another planned step may run in here. May be nested; does nothing outside of regions.
    """
    natives = loaded_modules()
    for native in natives:
        native.interrupt()
    try:
        yield
    finally:
        for native in natives:
            native.resume()


def _require_native(device: torch.device) -> NativeModule:
    native = native_module(device.type)
    if native is None:
        raise ArenaUnavailableError(
            f"there is no native allocator for {device}: it could not be built, or is disabled"
        )
    return native


def _check_table(buffer: Buffer, operator_count: int, requests: Sequence[PlannedRequest], base: int) -> None:
    if operator_count < 0:
        raise ValueError(f"an allocation table of {operator_count} operators cannot be")
    alignment_bytes = alignment_of(buffer.device)
    if base < 0 or base % alignment_bytes:
        raise ValueError(f"an arena cannot begin at {base}: it must be a multiple of {alignment_bytes}")
    seen: set[tuple[int, int]] = set()
    for request in requests:
        operator, ordinal, size_bytes, offset = (
            request.operator, request.ordinal, request.size_bytes, request.offset,
        )  # fmt: skip
        if not 0 <= operator < operator_count or ordinal < 0:
            raise ValueError(f"{_name(request)} does not exist: there are {operator_count} operators")
        if (operator, ordinal) in seen:
            raise ValueError(f"{_name(request)} is planned twice")
        seen.add((operator, ordinal))
        if size_bytes <= 0:
            raise ValueError(
                f"{_name(request)} is of {size_bytes} B; only requests of a byte or more are seen"
            )
        if offset is None:
            continue
        end = base + offset + size_bytes
        if offset < 0 or end > buffer.buffer_bytes:
            where = f"[{base + offset}, {end})"
            raise ValueError(
                f"{_name(request)}, at {where}, is not inside the {buffer.buffer_bytes} B buffer"
            )
        if offset % alignment_bytes:
            raise ValueError(f"{_name(request)}: offset {offset} is no multiple of {alignment_bytes}")


def _name(request: PlannedRequest) -> str:
    return f"request {request.ordinal} of operator {request.operator}"
