"""Watches the buffers of a pool that one test has for itself."""

from __future__ import annotations

import weakref

import pytest

from olla_fx import arena
from olla_fx.run.pool import buffer_pool


class LiveBuffers:
    """The buffers that are alive.

    Attributes:
        limit_bytes: no larger buffer can be made.
        most_bytes: of all at once, so far.
        made: how many were made.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[arena.Buffer] = weakref.WeakSet()
        self._make = arena.Buffer
        self.limit_bytes = 1 << 40
        self.most_bytes = 0
        self.made = 0

    def make(self, buffer_bytes, device):
        if buffer_bytes > self.limit_bytes:
            raise MemoryError(f"no more than {self.limit_bytes} B are there")
        buffer = self._make(buffer_bytes, device)
        self._alive.add(buffer)
        self.made += 1
        self.most_bytes = max(self.most_bytes, sum(self.sizes()))
        return buffer

    def sizes(self) -> list[int]:
        """Return the bytes of each, the smallest first."""
        return sorted(buffer.buffer_bytes for buffer in self._alive)


@pytest.fixture
def buffers(monkeypatch) -> LiveBuffers:
    live = LiveBuffers()
    monkeypatch.setattr(buffer_pool, "_pools", {})
    monkeypatch.setattr(arena, "Buffer", live.make)
    return live
