"""One buffer of the pool, its free addresses, and the gradients that a backward has left in it.

New gradients become ``.grad`` where they were made, in the buffer: they are the caller's, and gone before the
next run if the loop clears them first. If they are still there, they are moved to memory of their own; the
tensor objects stay the same. A run that finds room beside them leaves them there, and no run of another
thread than the one that left them moves them: that one may be using them. Views would not follow, so a
gradient that shares its storage with another tensor stays, and its place is of no use until it is gone; the
plan that left it there is told, and leaves none any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from olla_fx import arena
from olla_fx.alignment import alignment_of

if TYPE_CHECKING:
    from olla_fx.run.pool.claim import Claim

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
    """

    def __init__(self, buffer: arena.Buffer) -> None:
        """Take over a buffer."""
        self.buffer: arena.Buffer | None = buffer
        self.buffer_bytes = buffer.buffer_bytes
        self.colour: int | None = None
        self.is_too_large = self.is_untidy = False
        self.arenas: weakref.WeakKeyDictionary[Any, dict[int, arena.Arena]] = weakref.WeakKeyDictionary()
        self._device = buffer.device
        self._left: list[_Left] = []

    @property
    def outstanding_blocks(self) -> int:
        """The number of blocks in it that are alive."""
        return 0 if self.buffer is None else self.buffer.outstanding_blocks

    @property
    def holds_gradients(self) -> bool:
        """True if gradients that were left in it are alive; those that are gone are forgotten."""
        self._left = [left for left in self._left if not left.claim.is_over or left.gradients.any_alive()]
        return bool(self._left)

    @property
    def is_clean(self) -> bool:
        """True if no block in it is alive but gradients; an error's traceback may keep some."""
        blocks = self.outstanding_blocks
        return not blocks or blocks <= len(self._gradients())

    def room_for(self, needed_bytes: int, held: Iterable[Range], moved_by: int | None = None) -> int | None:
        """Return the lowest address, from the buffer's first, at which so many bytes are free.

        Args:
            needed_bytes: in one piece.
            held: what runs hold.
            moved_by: a thread that can move gradients away; None if they stay where they are.

        Returns:
            None if there is no such room.
        """
        alignment_bytes = alignment_of(self._device)
        staying = [
            place
            for left, _, place in self._gradients()
            if moved_by is None or left.is_stuck or left.claim.thread != moved_by
        ]
        start = 0
        for low, high in sorted([*held, *staying]):
            if start + needed_bytes <= low:
                break
            start = max(start, -(-high // alignment_bytes) * alignment_bytes)
        return start if start + needed_bytes <= self.buffer_bytes else None

    def owners_of_gradients(self, within: Range) -> list[Any]:
        """Return whose plans have left gradients at some addresses; None for an owner that is gone."""
        return [left.claim.plan_owner() for left, _, place in self._gradients() if _meet(place, within)]

    def leave_gradients(
        self, gradients: arena.LeftGradients, claim: Claim, tell_stuck: weakref.WeakMethod[Any]
    ) -> None:
        """Note what a run leaves in here.

        Args:
            gradients: complete when the run is over.
            claim: the run's. No run of another thread moves them, since that one may be using them.
            tell_stuck: called if some of them cannot be moved.
        """
        self._left.append(_Left(gradients, claim, tell_stuck))

    def vacate(self, thread: int, within: Range | None = None, but_of: object = None) -> None:
        """Move gradients that a thread's runs have left in here to memory of their own.

        Args:
            thread: the one that asks, or waits for what asks.
            within: only those that lie at these addresses, from the buffer's first; None for all.
            but_of: an owner whose own ones stay.
        """
        if not self.holds_gradients:
            return
        for left in self._left:
            if left.claim.thread == thread and (but_of is None or left.claim.plan_owner() is not but_of):
                with torch.inference_mode(False), torch.no_grad():
                    self._move(left, within)
                tell = left.tell_stuck() if left.is_stuck else None
                if tell is not None:
                    tell()

    def _move(self, left: _Left, within: Range | None) -> None:
        """Move gradients out of the buffer, or of a part of it, but those that share their storage."""
        waiting, staying = left.gradients.take(), []
        try:
            while waiting:
                place = self._place_of(waiting[-1])
                if place is not None and (within is None or _meet(place, within)):
                    if arena.shares_storage(waiting[-1]):
                        left.is_stuck = True
                        staying.append(waiting[-1])
                    else:
                        waiting[-1].data = waiting[-1].clone()
                elif place is not None:
                    staying.append(waiting[-1])
                waiting.pop()
        finally:
            # An interrupt leaves some that were not looked at.
            for gradient in waiting + staying:
                left.gradients.put_back(gradient)

    def _gradients(self) -> list[tuple[_Left, torch.Tensor, Range]]:
        """Return the gradients that are alive in here, with where they lie."""
        if not self._left or not self.holds_gradients:
            return []
        return [
            (left, gradient, place)
            for left in self._left
            for gradient in left.gradients.alive()
            if (place := self._place_of(gradient)) is not None
        ]

    def _place_of(self, gradient: torch.Tensor) -> Range | None:
        """Return where a gradient lies, from the buffer's first address; None if that is elsewhere."""
        if self.buffer is None:
            return 0, self.buffer_bytes  # of a buffer that was dropped, for which the gradient alone stands
        start = gradient.data_ptr() - self.buffer.address
        return (start, start + gradient.nbytes) if 0 <= start < self.buffer_bytes else None


@dataclass(slots=True)
class _Left:
    """What one run has left; see :meth:`Segment.leave_gradients`.

    Attributes:
        is_stuck: True once some of it could not be moved.
    """

    gradients: arena.LeftGradients
    claim: Claim
    tell_stuck: weakref.WeakMethod[Any]
    is_stuck: bool = False


def _meet(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]
