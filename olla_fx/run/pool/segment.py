"""One buffer of the pool, and the gradients that a backward has left in it.

New gradients become ``.grad`` where they were made, in the buffer: they are the caller's, and gone before the
next run if the loop clears them first. If they are still there, they are moved to memory of their own; the
tensor objects stay the same. Views would not follow, so a gradient that shares its storage with another
tensor stays, and the segment is of no use until it is gone; the plan that left it there is told, and leaves
none any more.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeAlias

import torch

from olla_fx import arena

LeftGradients: TypeAlias = "list[weakref.ref[torch.Tensor]]"
"""Gradients in a segment; a run adds to the list as it makes them."""


class Segment:
    """One buffer of a pool.

    Attributes:
        buffer: None once it was freed.
        colour: of the largest plan whose last run was here.
        is_too_large: True if none of these plans needs so much.
        is_untidy: True if it is too large, or some of these plans have another colour.
        buffer_bytes: its size.
        arenas: serve the plans whose last run was here, by owner; None until an owner's next run makes it.
    """

    def __init__(self, buffer: arena.Buffer) -> None:
        """Take over a buffer."""
        self.buffer: arena.Buffer | None = buffer
        self.buffer_bytes = buffer.buffer_bytes
        self.colour: int | None = None
        self.is_too_large = self.is_untidy = False
        self.arenas: weakref.WeakKeyDictionary[Any, arena.Arena | None] = weakref.WeakKeyDictionary()
        self._device = buffer.device
        self._left: list[LeftGradients] = []
        self._tell_stuck: list[weakref.WeakMethod[Any]] = []
        self._thread: int | None = None

    @property
    def outstanding_blocks(self) -> int:
        """The number of blocks in it that are alive."""
        return 0 if self.buffer is None else self.buffer.outstanding_blocks

    @property
    def holds_gradients(self) -> bool:
        """True if gradients that were left in it are alive; those that are gone are forgotten."""
        self._left = [
            [reference for reference in gradients if reference() is not None] for gradients in self._left
        ]
        self._left = [gradients for gradients in self._left if gradients]
        return bool(self._left)

    def note_thread(self) -> None:
        """Note that the calling thread's run is here."""
        self._thread = threading.get_ident()

    def leave_gradients(self, gradients: LeftGradients, tell_stuck: weakref.WeakMethod[Any]) -> None:
        """Note what a run leaves in here.

        Args:
            gradients: complete when the run is over.
            tell_stuck: called if some of them cannot be moved.
        """
        self._left.append(gradients)
        self._tell_stuck.append(tell_stuck)

    def vacate(self) -> None:
        """Move gradients that lie in here to memory of their own, unless another thread may be using them."""
        if self._thread != threading.get_ident() or not self.holds_gradients:
            return
        stuck: LeftGradients = []
        left = [reference for gradients in self._left for reference in gradients]
        self._left = [left, stuck]
        shares_storage = arena.accumulation(self._device).shares_storage
        with torch.inference_mode(False), torch.no_grad():
            while left:
                gradient = left[-1]()
                if gradient is None or (self.buffer and not self.buffer.contains(gradient.data_ptr())):
                    pass
                elif shares_storage(gradient):
                    stuck.append(left[-1])
                else:
                    gradient.data = gradient.clone()
                left.pop()
        self._left = [stuck]
        if stuck:
            for reference in self._tell_stuck:
                tell = reference()
                if tell is not None:
                    tell()
        self._tell_stuck = []
