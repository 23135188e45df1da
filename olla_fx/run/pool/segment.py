"""One buffer of the pool, its free addresses, and the gradients that a backward has left in it.

New gradients become ``.grad`` where they were made, in the buffer: they are the caller's, and gone before the
next run if the loop clears them first. If they are still there, they are moved to memory of their own; the
tensor objects stay the same; a run that finds room beside them leaves them there. Views would not follow, so
a gradient that shares its storage with another tensor stays, and its place is of no use until it is gone; the
plan that left it there is told, and leaves none any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from olla_fx import arena
from olla_fx.alignment import alignment_of

Range: TypeAlias = tuple[int, int]
"""Addresses from a buffer's first one, half open."""


class Segment:
    """One buffer of a pool.

    Attributes:
        buffer: None once it was freed.
        colour: of the largest plan whose last run was here.
        is_too_large: True if none of these plans needs so much.
        is_untidy: True if it is too large, or some of these plans have another colour.
        buffer_bytes: its size.
        arenas: serve the plans whose last run was here, by owner and by the address from which they run.
        last_owner: whose run began here last.
    """

    def __init__(self, buffer: arena.Buffer) -> None:
        """Take over a buffer."""
        self.buffer: arena.Buffer | None = buffer
        self.buffer_bytes = buffer.buffer_bytes
        self.colour: int | None = None
        self.is_too_large = self.is_untidy = False
        self.arenas: weakref.WeakKeyDictionary[Any, dict[int, arena.Arena]] = weakref.WeakKeyDictionary()
        self.last_owner: weakref.ref[Any] | None = None
        self._device = buffer.device
        self._left: list[arena.LeftGradients] = []
        self._tell_stuck: list[weakref.WeakMethod[Any]] = []
        self._thread: int | None = None

    @property
    def outstanding_blocks(self) -> int:
        """The number of blocks in it that are alive."""
        return 0 if self.buffer is None else self.buffer.outstanding_blocks

    @property
    def holds_gradients(self) -> bool:
        """True if gradients that were left in it are alive; those that are gone are forgotten."""
        self._left = [gradients for gradients in self._left if gradients.any_alive()]
        return bool(self._left)

    def note_run(self, plan_owner: object) -> None:
        """Note that the calling thread's run is here."""
        self._thread = threading.get_ident()
        self.last_owner = weakref.ref(plan_owner)

    @property
    def is_clean(self) -> bool:
        """True if no block in it is alive but gradients; an error's traceback may keep some."""
        return self.outstanding_blocks <= len(self._gradients_alive())

    def room_for(self, needed_bytes: int, held: Iterable[Range], *, beside_gradients: bool) -> int | None:
        """Return the lowest address, from the buffer's first, at which so many bytes are free.

        Args:
            needed_bytes: in one piece.
            held: what runs hold.
            beside_gradients: True if gradients that were left stay where they are.

        Returns:
            None if there is no such room.
        """
        alignment_bytes = alignment_of(self._device)
        taken = sorted([*held, *(self._gradient_ranges() if beside_gradients else ())])
        start = 0
        for low, high in taken:
            if start + needed_bytes <= low:
                break
            start = max(start, -(-high // alignment_bytes) * alignment_bytes)
        return start if start + needed_bytes <= self.buffer_bytes else None

    def _gradients_alive(self) -> list[torch.Tensor]:
        if not self.holds_gradients:
            return []
        return [gradient for gradients in self._left for gradient in gradients.alive()]

    def _gradient_ranges(self) -> list[Range]:
        if self.buffer is None:
            return []
        first = self.buffer.address
        starts = [(gradient.data_ptr() - first, gradient.nbytes) for gradient in self._gradients_alive()]
        return [(start, start + size) for start, size in starts if 0 <= start < self.buffer_bytes]

    def leave_gradients(self, gradients: arena.LeftGradients, tell_stuck: weakref.WeakMethod[Any]) -> None:
        """Note what a run leaves in here.

        Args:
            gradients: complete when the run is over.
            tell_stuck: called if some of them cannot be moved.
        """
        self._left.append(gradients)
        self._tell_stuck.append(tell_stuck)

    def vacate(self, within: Range | None = None) -> None:
        """Move gradients that lie in here to memory of their own, unless another thread may be using them.

        Args:
            within: only those that lie at these addresses, from the buffer's first; None for all.
        """
        if self._thread != threading.get_ident() or not self.holds_gradients:
            return
        with torch.inference_mode(False), torch.no_grad():
            moved = [self._move(left, within) for left in self._left]
        if any(is_stuck for is_stuck, _ in moved):
            for reference in self._tell_stuck:
                tell = reference()
                if tell is not None:
                    tell()
        if not any(is_staying for _, is_staying in moved):
            self._tell_stuck = []

    def _move(self, left: arena.LeftGradients, within: Range | None) -> tuple[bool, bool]:
        """Move gradients out of the buffer, or of a part of it; tell if some cannot be moved, or need not."""
        first = 0 if self.buffer is None else self.buffer.address
        waiting, staying, stuck = left.take(), [], []
        try:
            while waiting:
                gradient = waiting[-1]
                if self.buffer is not None and not self.buffer.contains(gradient.data_ptr()):
                    pass
                elif within is not None and not _meets(gradient, first, within):
                    staying.append(gradient)
                elif arena.shares_storage(gradient):
                    stuck.append(gradient)
                else:
                    gradient.data = gradient.clone()
                waiting.pop()
        finally:
            for gradient in waiting + staying + stuck:
                left.put_back(gradient)
        return bool(stuck), bool(staying)


def _meets(gradient: torch.Tensor, first: int, within: Range) -> bool:
    start = gradient.data_ptr() - first
    return start < within[1] and within[0] < start + gradient.nbytes
