"""Host memory for the arrays of a plan: one buffer for each run that is under way, page-locked for CUDA.

A buffer is allocated when a run first needs one, and kept for the next. It is freed with the plan, or with
the last array that a run which was given up has left there.
"""

from __future__ import annotations

import contextlib
import weakref

import torch

from olla_fx.errors import HostMemoryError
from olla_fx.report import format_bytes

_all: weakref.WeakSet[HostMemory] = weakref.WeakSet()


class HostMemory:
    """The host's buffers of one plan.

    Attributes:
        size_bytes: of each.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Start without memory.

        Args:
            size_bytes: of a buffer.
            device: what is copied from and to; a CUDA device copies beside computing from page-locked memory
                alone.
        """
        self.size_bytes = size_bytes
        self._is_pinned = device.type == "cuda"
        self._idle: list[torch.Tensor] = []
        _all.add(self)

    def take(self) -> torch.Tensor:
        """Return a buffer for a run, as bytes.

        Raises:
            HostMemoryError: if there is not enough memory.
        """
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        try:
            return torch.empty(self.size_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)
        except RuntimeError as error:
            kind = "page-locked memory (pinned, which swapping needs)" if self._is_pinned else "memory"
            raise HostMemoryError(
                f"the host has no {format_bytes(self.size_bytes)} of {kind} for the arrays that wait there: "
                f"{str(error).splitlines()[0]}. Swap less, or plan with swap=False"
            ) from error

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back from a run that is over."""
        self._idle.append(buffer)

    def poison(self, byte: int) -> None:
        """Overwrite the buffers that no run uses."""
        for buffer in self._idle:
            buffer.fill_(byte)


def poison_host_memory(byte: int = 0xFF) -> None:
    """Overwrite the host's buffers that no run uses, to show that no run depends on what another one left."""
    for memory in list(_all):
        memory.poison(byte)
