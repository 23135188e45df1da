"""Shares buffers among all planned modules of a process: one pool for each device.

A run claims addresses in a buffer of the pool, a *segment*, and holds them until it is over; in the caller's
own loop that is when backward has run. Plans that run in turn share a segment as large as the largest. While
a run waits for its backward it holds only what is alive then, and another plan may run in the rest of the
segment (a discriminator between a generator's forward and backward), which is made large enough for both.
Plans that were seen to run at the same time, or to wait for each other crosswise, are kept apart. Who shares
is a colouring of the graph of plans that overlap in time, where a colour costs what its largest plan needs
(max-coloring, Pemmaraju et al., "Buffer minimization using max-coloring"): first fit, the largest plan first.

A segment that is too small is freed before a larger one is allocated, and one that no living plan needs so
large is freed as soon as it is idle. What ends a claim or a plan may be the garbage collector, in any thread
and at any moment, so a release never waits for the pool's lock: whoever holds the lock tidies up afterwards.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from olla_fx import arena
from olla_fx.alignment import alignment_of
from olla_fx.run.pool.claim import Claim, HeldRange, Way
from olla_fx.run.pool.segment import Segment


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
        self._wanted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._nested: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._hosts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._overlaps: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        self._colours: weakref.WeakKeyDictionary[Any, int] | None = None

    def want(self, plan_owner: object, buffer_bytes: int) -> None:
        """Note the bytes that the plan of an owner needs, as long as that owner lives; forget its arenas."""
        with self._locked():
            if plan_owner not in self._wanted:
                self._overlaps[plan_owner] = weakref.WeakSet()
                weakref.finalize(plan_owner, self._tidy_after_change).atexit = False
            else:
                # What it holds while it waits may be another part now.
                self._nested.clear()
            self._wanted[plan_owner] = buffer_bytes
            for segment in self._segments:
                if plan_owner in segment.arenas:
                    segment.arenas[plan_owner] = {}
        self._tidy_after_change()

    def is_host(self, plan_owner: object) -> bool:
        """Return True if other plans were to run beside what this one's run holds or has left."""
        return plan_owner in self._hosts

    def attend(self, plan_owner: object) -> Claim:
        """Note that a run has begun that needs no segment; its plan will not share with what runs now."""
        with self._locked():
            self._note_overlaps(plan_owner)
            return self._enter(Claim(plan_owner))

    def claim(self, plan_owner: object) -> Claim:
        """Claim a part of a segment for a run; never waits for another run.

        Args:
            plan_owner: the caller of :meth:`want`.

        Raises:
            MemoryError: if the device has not enough memory.
        """
        with self._locked():
            self._note_overlaps(plan_owner)
            if self._dropped:
                self._free_dropped()
            segment, base = self._home(plan_owner) or self._move(plan_owner, *self._place_for(plan_owner))
            segment.note_run(plan_owner)
            return self._enter(Claim(plan_owner, segment, base, base + self._wanted[plan_owner]))

    def wait(self, claim: Claim, held: HeldRange) -> None:
        """Note that a run waits for its caller, and holds only a part of what it has claimed meanwhile.

        Args:
            claim: the run's.
            held: returns the part, counted from where the claim begins.
        """
        claim.held = held

    def resume(self, claim: Claim) -> Way:
        """Note that a run goes on, in all that it has claimed, and say what is there."""
        if claim.segment is None or len(self._claims) == 1:
            claim.held = None
            return Way.FREE
        with self._locked():
            others = [other for other in self._claims_in(claim.segment) if other is not claim]
            if any(other.held is None for other in others):
                return Way.BUSY
            claim.held = None
            low, high = claim.range
            ranges = [(other, *other.range) for other in others]
            in_the_way = [other for other, start, end in ranges if start < high and low < end]
            plan_owner = claim.plan_owner()
            for other in in_the_way:
                if plan_owner is not None:
                    self._keep_apart(plan_owner, other.plan_owner())
            return Way.TAKEN if in_the_way else Way.FREE

    def release(self, claim: Claim) -> None:
        """End a claim; may be called at any moment, by the garbage collector, too."""
        self._claims.discard(claim)
        if claim.segment is not None and claim.segment.is_untidy:
            self._tidy()

    def fits(self, claim: Claim, plan_owner: object) -> bool:
        """Return True if a claim is good for a run of this owner's plan."""
        return (
            claim.segment is not None
            and claim.plan_owner() is plan_owner
            and claim.base + self._wanted[plan_owner] <= claim.end
        )

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite all free segments, to show that no step depends on what an earlier one left."""
        with self._locked():
            for segment in self._free():
                segment.vacate()
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
        self._colours = None
        self._tidy()

    # From here on the caller holds the lock.

    def _trim(self) -> None:
        colours = self._colours_of_plans()
        for segment in self._segments:
            largest = self._largest_user(segment)
            segment.colour = None if largest is None else colours[largest]
            segment.is_too_large = largest is None or segment.buffer_bytes > max(
                self._wanted[largest], self._nested_bytes(colours[largest])
            )
            # A run that ends from here on finds the mark; that of one that has ended is not held any more.
            segment.is_untidy = segment.is_too_large or any(
                colours[owner] != segment.colour for owner in segment.arenas
            )
        for segment in self._free():
            if segment.is_too_large:
                self._drop(segment)
            elif segment.is_untidy:
                for owner in list(segment.arenas):
                    if colours[owner] != segment.colour:
                        del segment.arenas[owner]
                segment.is_untidy = False
        self._is_settled = len({segment.colour for segment in self._segments}) == len(self._segments)
        self._is_settled &= not any(segment.is_untidy for segment in self._segments)

    def _free(self) -> list[Segment]:
        held = {claim.segment for claim in self._claims.copy()}
        return [segment for segment in self._segments if segment not in held]

    def _largest_user(self, segment: Segment) -> Any:
        """Return the owner of the largest plan whose last run was here; None if there is none."""
        return max(segment.arenas, key=self._wanted.__getitem__, default=None)

    def _note_overlaps(self, plan_owner: object) -> None:
        for claim in self._claims.copy():
            if not claim.lets_others_run:
                self._keep_apart(plan_owner, claim.plan_owner())

    def _keep_apart(self, plan_owner: object, other: object) -> None:
        overlaps = self._overlaps[plan_owner]
        if other is not None and other is not plan_owner and other not in overlaps:
            overlaps.add(other)
            self._overlaps[other].add(plan_owner)
            self._nested.clear()
            self._colours = None
            self._is_untidy = True

    def _enter(self, claim: Claim) -> Claim:
        self._claims.add(claim)
        return claim

    def _claims_in(self, segment: Segment) -> list[Claim]:
        return [claim for claim in self._claims.copy() if claim.segment is segment]

    def _home(self, plan_owner: object) -> tuple[Segment, int] | None:
        """Return where the owner's last run was, if there is room and all plans are where they belong."""
        if self._is_settled and not self._is_untidy:
            for segment in self._segments:
                if plan_owner in segment.arenas:
                    base = self._room(plan_owner, segment)
                    return None if base is None else (segment, base)
        return None

    def _room(self, plan_owner: object, segment: Segment) -> int | None:
        """Return where in a segment a plan can run; gradients that are in its way are moved out."""
        claims = self._claims_in(segment)
        if not all(claim.lets_others_run for claim in claims) or not (claims or segment.is_clean):
            return None
        needed_bytes, held = self._wanted[plan_owner], [claim.range for claim in claims]
        base = segment.room_for(needed_bytes, held, beside_gradients=True)
        if base is None:
            base = segment.room_for(needed_bytes, held, beside_gradients=False)
            if base is not None:
                self._note_host(plan_owner, segment.last_owner)
                segment.vacate((base, base + needed_bytes))
                if segment.room_for(needed_bytes, held, beside_gradients=True) != base:
                    return None
        return base

    def _note_host(self, plan_owner: object, host: weakref.ref[Any] | None) -> None:
        owner = None if host is None else host()
        if owner is not None and owner is not plan_owner:
            self._hosts.add(owner)

    def _free_dropped(self) -> None:
        """Move gradients out of dropped segments, whose memory goes with the last block that is alive."""
        for segment in self._dropped:
            segment.vacate()
        self._dropped = [segment for segment in self._dropped if segment.holds_gradients]

    def _move(self, plan_owner: object, segment: Segment, base: int) -> tuple[Segment, int]:
        """Make a segment the home of an owner."""
        for other in self._segments:
            if other is not segment:
                other.arenas.pop(plan_owner, None)
        segment.arenas.setdefault(plan_owner, {})
        self._is_untidy = True
        return segment, base

    def _place_for(self, plan_owner: object) -> tuple[Segment, int]:
        """Return room in a segment of the owner's colour; in a new one if those that are idle are too small.

        A segment has the colour of its largest plan. One in which a block of an earlier run is still alive,
        as an error's traceback may keep it, is left alone.
        """
        needed_bytes = self._wanted[plan_owner]
        colours = self._colours_of_plans()
        nested_bytes = self._nested_bytes(colours[plan_owner])
        segments = []
        for segment in self._segments:
            largest = self._largest_user(segment)
            if largest is not None and colours[largest] == colours[plan_owner]:
                segments.append(segment)
        idle = [segment for segment in segments if not self._claims_in(segment)]
        waiting = [segment for segment in segments if segment not in idle]
        if not waiting:
            needed_bytes = max(needed_bytes, nested_bytes)
        for segment in waiting + idle:
            if segment in idle and waiting:
                self._note_nested(plan_owner, waiting)
            base = self._room(plan_owner, segment) if segment.buffer_bytes >= needed_bytes else None
            if base is not None:
                return segment, base
        self._note_nested(plan_owner, waiting)
        for segment in idle:
            segment.vacate()
            if not segment.outstanding_blocks:
                self._drop(segment)
        segment = Segment(self._allocate_instead(needed_bytes))
        self._segments.append(segment)
        return segment, 0

    def _note_nested(self, plan_owner: object, segments: list[Segment]) -> None:
        """Note how large a segment must be so that a plan can run beside what waits in it."""
        alignment_bytes = alignment_of(self._device)
        for segment in segments:
            claims = self._claims_in(segment)
            if claims and all(claim.lets_others_run for claim in claims):
                for claim in claims:
                    self._note_host(plan_owner, claim.plan_owner)
                end = -(-max(claim.range[1] for claim in claims) // alignment_bytes) * alignment_bytes
                needed_bytes = end + self._wanted[plan_owner]
                self._nested[plan_owner] = max(needed_bytes, self._nested.get(plan_owner, 0))

    def _nested_bytes(self, colour: int) -> int:
        """Return what the plans of a colour need while others wait; 0 if none was seen to."""
        colours = self._colours_of_plans()
        return max((size for owner, size in self._nested.items() if colours[owner] == colour), default=0)

    def _colours_of_plans(self) -> weakref.WeakKeyDictionary[Any, int]:
        """Return a number for each owner; those whose plans share a segment have the same."""
        colours = self._colours
        if colours is None:
            colours = self._colours = weakref.WeakKeyDictionary()
            for owner in sorted(self._wanted, key=self._wanted.__getitem__, reverse=True):
                taken = {colours.get(other) for other in self._overlaps[owner]}
                colours[owner] = next(colour for colour in itertools.count() if colour not in taken)
        return colours

    def _allocate_instead(self, buffer_bytes: int) -> arena.Buffer:
        """Allocate a buffer, if need be in the place of all that is idle."""
        try:
            return self._allocate(buffer_bytes)
        except MemoryError:
            for unused in self._free():
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
