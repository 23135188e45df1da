"""Shares buffers among all planned modules of a process: one pool for each device.

A run claims addresses in a buffer of the pool, a *segment*, and holds them until it is over; in the caller's
own loop that is when backward has run. Plans that run in turn share a segment as large as the largest. While
a run waits for its backward it holds only what is alive then, and another plan of the same thread may run in
the rest of the segment (a discriminator between a generator's forward and backward), which is made large
enough for both. Plans that run at the same time get segments of their own; :mod:`.sharing` knows which do.

A segment is

========= ===============================================================================================
idle      if no run has a claim in it; it may still hold gradients that a backward has left
clean     if beside these no block in it is alive; an error's traceback may keep some
too large if no living plan that ran there needs so much: it is freed as soon as it is idle
untidy    if it is too large, or the home of plans of several colours
dropped   once it is freed, while gradients in it keep its memory
========= ===============================================================================================

and the pool is *settled* if every segment is tidy and the only one of its colour. A segment that is too small
is freed before a larger one is allocated. What ends a claim or a plan may be the garbage collector, in any
thread and at any moment, so a release never waits for the lock: whoever holds it tidies up afterwards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from olla_fx import arena
from olla_fx.alignment import alignment_of
from olla_fx.run.pool.claim import Claim, Way
from olla_fx.run.pool.segment import Range, Segment
from olla_fx.run.pool.sharing import Sharing


class BufferPool:
    """The segments of a device, and the plans that run in them; a plan is known by its owner."""

    def __init__(self, device: torch.device) -> None:
        """Start without memory; see :func:`pool_of`."""
        self._device = device
        self._lock = threading.Lock()
        self._is_untidy = self._is_settled = False
        self._segments: list[Segment] = []
        self._dropped: list[Segment] = []
        self._claims: set[Claim] = set()
        self._sharing = Sharing()

    def want(self, plan_owner: object, buffer_bytes: int) -> None:
        """Note the bytes that the plan of an owner needs, as long as that owner lives; forget its arenas."""
        with self._locked():
            if self._sharing.want(plan_owner, buffer_bytes):
                weakref.finalize(plan_owner, self._tidy_after_change).atexit = False
            for segment in self._segments:
                if plan_owner in segment.arenas:
                    segment.arenas[plan_owner] = {}
        self._tidy_after_change()

    def is_host(self, plan_owner: object) -> bool:
        """Return True if other plans were to run beside what this one's run holds or has left."""
        return self._sharing.is_host(plan_owner)

    def attend(self, plan_owner: object) -> Claim:
        """Note that a run has begun that needs no segment; its plan will not share with what runs now."""
        with self._locked():
            self._note_running(plan_owner)
            return self._enter(Claim(plan_owner))

    def claim(self, plan_owner: object, *, alone: bool = False) -> Claim:
        """Claim a part of a segment for a run; never waits for another run.

        Args:
            plan_owner: the caller of :meth:`want`.
            alone: True for a run that begins at the segment's first address, and overwrites what is there.

        Raises:
            MemoryError: if the device has not enough memory.
        """
        with self._locked():
            self._note_running(plan_owner)
            if self._dropped:
                self._free_dropped()
            claim = self._at_home(plan_owner, alone) or self._elsewhere(plan_owner, alone)
            return self._enter(claim)

    def wait(self, claim: Claim, held_range: Callable[[], Range]) -> None:
        """Note that a run waits for its caller, and holds only a part of what it has claimed meanwhile.

        Args:
            claim: the run's.
            held_range: returns the part, counted from where the claim begins.
        """
        claim.held_range = held_range

    def resume(self, claim: Claim) -> Way:
        """Note that a run goes on, in all that it has claimed; what others have left there is moved out."""
        segment, plan_owner = claim.segment, claim.plan_owner()
        if segment is None:
            claim.held_range = None
            return Way.FREE
        with self._locked():
            others = [other for other in self._claims_in(segment) if other is not claim]
            running = [other for other in others if other.held_range is None]
            if not running:
                claim.held_range = None
            low, high = claim.base, claim.end
            ranges = [(other, *other.range) for other in others if other not in running]
            in_the_way = [other for other, start, end in ranges if start < high and low < end]
            for other in running + in_the_way:
                self._keep_apart(plan_owner, other.plan_owner())
            if running:
                return Way.BUSY
            # Its own are of a backward that runs again, and where the plan has them.
            is_clear = self._move_gradients(plan_owner, segment, (low, high), claim.thread, but_of=plan_owner)
            return Way.TAKEN if in_the_way or not is_clear else Way.FREE

    def release(self, claim: Claim) -> None:
        """End a claim; may be called at any moment, by the garbage collector, too."""
        claim.is_over = True
        self._claims.discard(claim)
        if claim.segment is not None and claim.segment.is_untidy:
            self._tidy()

    def fits(self, claim: Claim, plan_owner: object) -> bool:
        """Return True if a claim is good for a run of this owner's plan."""
        return (
            claim.segment is not None
            and claim.plan_owner() is plan_owner
            and claim.base + self._sharing.wanted[plan_owner] <= claim.end
        )

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite all idle segments, to show that no step depends on what an earlier one left."""
        with self._locked():
            for segment in self._idle():
                segment.vacate(threading.get_ident())
                if segment.buffer is not None and not segment.outstanding_blocks:
                    segment.buffer.poison(byte)

    def _locked(self) -> _Locked:
        return _Locked(self)

    def _tidy(self) -> None:
        """Free the segments that no plan needs; if the lock is held, its holder does so afterwards."""
        self._is_untidy = True
        while self._is_untidy and self._lock.acquire(blocking=False):
            try:
                self._is_untidy = False
                self._trim()
            finally:
                self._lock.release()

    def _tidy_after_change(self) -> None:
        self._sharing.colour_again()
        self._tidy()

    # From here on the caller holds the lock.

    def _trim(self) -> None:
        colours, wanted, beside = self._sharing.colours, self._sharing.wanted, self._sharing.bytes_beside()
        for segment in self._segments:
            largest = self._largest_user(segment)
            segment.colour = None if largest is None else colours[largest]
            segment.is_too_large = largest is None or segment.buffer_bytes > max(
                wanted[largest], beside.get(colours[largest], 0)
            )
            # A run that ends from here on finds the mark; that of one that has ended is not held any more.
            segment.is_untidy = segment.is_too_large or any(
                colours[owner] != segment.colour for owner in segment.arenas
            )
        for segment in self._idle():
            if segment.is_too_large:
                self._drop(segment)
            elif segment.is_untidy:
                for owner in list(segment.arenas):
                    if colours[owner] != segment.colour:
                        del segment.arenas[owner]
                segment.is_untidy = False
        self._is_settled = len({segment.colour for segment in self._segments}) == len(self._segments)
        self._is_settled &= not any(segment.is_untidy for segment in self._segments)

    def _idle(self) -> list[Segment]:
        held = {claim.segment for claim in self._claims.copy()}
        return [segment for segment in self._segments if segment not in held]

    def _largest_user(self, segment: Segment) -> Any:
        """Return the owner of the largest plan whose last run was here; None if there is none."""
        return max(segment.arenas, key=self._sharing.wanted.__getitem__, default=None)

    def _note_running(self, plan_owner: object) -> None:
        """Keep a plan that begins to run apart from all whose runs do not wait for this thread."""
        for claim in self._claims.copy():
            if not claim.lets_others_run:
                self._keep_apart(plan_owner, claim.plan_owner())

    def _keep_apart(self, plan_owner: object, other: object) -> None:
        if plan_owner is not None and self._sharing.keep_apart(plan_owner, other):
            self._is_untidy = True

    def _enter(self, claim: Claim) -> Claim:
        self._claims.add(claim)
        return claim

    def _claims_in(self, segment: Segment) -> list[Claim]:
        return [claim for claim in self._claims.copy() if claim.segment is segment]

    def _at_home(self, plan_owner: object, alone: bool) -> Claim | None:
        """Claim room where the owner's last run was, if all plans are where they belong."""
        if self._is_settled and not self._is_untidy:
            for segment in self._segments:
                if plan_owner in segment.arenas:
                    return self._claim_in(segment, plan_owner, alone)
        return None

    def _elsewhere(self, plan_owner: object, alone: bool) -> Claim:
        """Claim room in a segment of the owner's colour; in a new one if those that are idle are too small.

        A segment has the colour of its largest plan. One in which a block of an earlier run is still alive,
        as an error's traceback may keep it, is left alone.
        """
        colours, needed_bytes = self._sharing.colours, self._sharing.wanted[plan_owner]
        segments = []
        for segment in self._segments:
            largest = self._largest_user(segment)
            if largest is not None and colours[largest] == colours[plan_owner]:
                segments.append(segment)
        idle = [segment for segment in segments if not self._claims_in(segment)]
        waiting = [segment for segment in segments if segment not in idle]
        for segment in waiting:
            claim = self._claim_in(segment, plan_owner, alone)
            if claim is not None:
                return self._move_home(claim, plan_owner)
        if waiting:
            self._note_beside(plan_owner, waiting)
        else:
            needed_bytes = max(needed_bytes, self._sharing.bytes_beside().get(colours[plan_owner], 0))
        for segment in idle:
            if segment.buffer_bytes >= needed_bytes:
                claim = self._claim_in(segment, plan_owner, alone)
                if claim is not None:
                    return self._move_home(claim, plan_owner)
        for segment in idle:
            segment.vacate(threading.get_ident())
            if not segment.outstanding_blocks:
                self._drop(segment)
        segment = Segment(self._allocate_instead(needed_bytes))
        self._segments.append(segment)
        return self._move_home(Claim(plan_owner, segment, 0, self._sharing.wanted[plan_owner]), plan_owner)

    def _claim_in(self, segment: Segment, plan_owner: object, alone: bool) -> Claim | None:
        """Claim room in a segment, from which gradients are moved if there is none beside them."""
        claims = self._claims_in(segment)
        needed_bytes, thread = self._sharing.wanted[plan_owner], threading.get_ident()
        if not all(claim.lets_others_run for claim in claims) or not (claims or segment.is_clean):
            return None
        if alone:
            segment.vacate(thread)
            fits = not (claims or segment.outstanding_blocks) and needed_bytes <= segment.buffer_bytes
            return Claim(plan_owner, segment, 0, needed_bytes) if fits else None
        held = [claim.range for claim in claims]
        base = segment.room_for(needed_bytes, held)
        if base is None:
            base = segment.room_for(needed_bytes, held, moved_by=thread)
            if base is None:
                return None
            if not self._move_gradients(plan_owner, segment, (base, base + needed_bytes), thread):
                return None
        return Claim(plan_owner, segment, base, base + needed_bytes)

    def _move_gradients(
        self, plan_owner: object, segment: Segment, within: Range, thread: int, but_of: object = None
    ) -> bool:
        """Move gradients that were left out of a plan's way; return False if some are still there."""
        for host in segment.owners_of_gradients(within):
            if host is not plan_owner:
                self._sharing.note_host(host)
        segment.vacate(thread, within, but_of=but_of)
        left = segment.owners_of_gradients(within)
        return all(but_of is not None and owner is but_of for owner in left)

    def _free_dropped(self) -> None:
        """Move gradients out of dropped segments, whose memory goes with the last block that is alive."""
        for segment in self._dropped:
            segment.vacate(threading.get_ident())
        self._dropped = [segment for segment in self._dropped if segment.holds_gradients]

    def _move_home(self, claim: Claim, plan_owner: object) -> Claim:
        """Make the segment of a claim the home of its owner."""
        for segment in self._segments:
            if segment is claim.segment:
                segment.arenas.setdefault(plan_owner, {})
            else:
                segment.arenas.pop(plan_owner, None)
        self._is_untidy = True
        return claim

    def _note_beside(self, plan_owner: object, segments: list[Segment]) -> None:
        """Note what a plan needs that is to run beside all that waits in some segments."""
        alignment_bytes = alignment_of(self._device)
        for segment in segments:
            for claim in self._claims_in(segment):
                if claim.lets_others_run:
                    held_bytes = -(-(claim.range[1] - claim.base) // alignment_bytes) * alignment_bytes
                    self._sharing.note_beside(plan_owner, claim.plan_owner(), held_bytes)

    def _allocate_instead(self, buffer_bytes: int) -> arena.Buffer:
        """Allocate a buffer, if need be in the place of all that is idle."""
        try:
            return self._allocate(buffer_bytes)
        except MemoryError:
            for unused in self._idle():
                if not unused.outstanding_blocks:
                    self._drop(unused)
            return self._allocate(buffer_bytes)

    def _allocate(self, buffer_bytes: int) -> arena.Buffer:
        if self._device.type == "cuda":
            # What was freed, here or by a step that was recorded, would stay reserved beside it.
            torch.cuda.empty_cache()
        return arena.Buffer(buffer_bytes, self._device)

    def _drop(self, segment: Segment) -> None:
        """Free a segment at once, whoever refers to it; the garbage collector may be at work."""
        self._segments.remove(segment)
        if segment.holds_gradients:
            self._dropped.append(segment)
        segment.arenas.clear()
        segment.buffer = None


class _Locked:
    """Holds a pool's lock, and tidies the pool up afterwards; entered at every call, so no generator."""

    __slots__ = ("_pool",)

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._pool._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._pool._lock.release()
        if self._pool._is_untidy:
            self._pool._tidy()


_pools: dict[torch.device, BufferPool] = {}


def pool_of(device: torch.device) -> BufferPool:
    """Return the one pool of a device."""
    return _pools.setdefault(device, BufferPool(device))
