"""Shares one buffer among a module's plans: sized by the largest of them, used by one run at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from olla_fx import arena


class SharedBuffer:
    """One buffer for all plans of a module; allocated when first needed, and anew for a larger plan."""

    def __init__(self) -> None:
        """Start without plans."""
        self._wanted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._buffer: arena.Buffer | None = None
        self._arenas: weakref.WeakKeyDictionary[Any, arena.Arena] = weakref.WeakKeyDictionary()
        self._busy = threading.Lock()
        self._sizing = threading.Lock()

    def want(self, plan_owner: object, buffer_bytes: int) -> None:
        """Note the bytes that the plan of an owner needs, as long as that owner lives."""
        with self._sizing:
            self._wanted[plan_owner] = buffer_bytes
            self._arenas.pop(plan_owner, None)

    def _buffer_for(self, plan_owner: object, device: torch.device) -> arena.Buffer:
        """Return a buffer of the largest plan's size; of the owner's own plan's if that does not fit."""
        with self._sizing:
            needed, largest = self._wanted[plan_owner], max(self._wanted.values())
        buffer = self._buffer
        if buffer is not None and buffer.device == device and needed <= buffer.buffer_bytes <= largest:
            return buffer
        was_on = None if buffer is None else buffer.device
        # Freed before the next one is allocated; arenas hold it, too.
        self._buffer = buffer = None
        self._arenas.clear()
        if was_on is not None and was_on.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self._buffer = arena.Buffer(largest, device)
        except MemoryError:
            if needed == largest:
                raise
            # A plan that is too large must not keep smaller ones from running.
            self._buffer = arena.Buffer(needed, device)
        return self._buffer

    def arena(
        self, plan_owner: object, device: torch.device, make: Callable[[arena.Buffer], arena.Arena]
    ) -> arena.Arena:
        """Return the arena that serves an owner's plan in the buffer; call it while holding a lease.

        Args:
            plan_owner: the caller of :meth:`want`; its arena is made anew after that call.
            device: of the buffer.
            make: puts the plan's requests into a buffer.

        Raises:
            MemoryError: if the device has not enough memory.
        """
        buffer = self._buffer_for(plan_owner, device)
        served_by = self._arenas.get(plan_owner)
        if served_by is None:
            served_by = self._arenas[plan_owner] = make(buffer)
        return served_by

    def lease(self, *, wait: bool) -> Lease | None:
        """Claim the buffer for one run.

        Args:
            wait: True to wait until it is free; False to return None if it is not.
        """
        return Lease(self._busy) if self._busy.acquire(blocking=wait) else None

    @property
    def is_busy(self) -> bool:
        """True if a run holds the buffer."""
        return self._busy.locked()

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite the buffer, to show that no step depends on what an earlier one left."""
        if self._buffer is not None:
            self._buffer.poison(byte)


class Lease:
    """A claim on the buffer; given up when released, or when nothing refers to it any more."""

    def __init__(self, busy: threading.Lock) -> None:
        """Take over a lock that is held."""
        self._busy: threading.Lock | None = busy

    def release(self) -> None:
        """Give the buffer back; once only."""
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.release()

    def __del__(self) -> None:
        """End a run whose graph the caller dropped."""
        self.release()
