"""Shares buffers among all planned modules of a process: one pool for each device.

A run claims one buffer of the pool, a *segment*, and holds it until it is over; in the caller's own loop that
is when backward has run. Plans that run in turn share a segment as large as the largest of them; plans that
were seen to run at the same time are kept apart. Who shares is a colouring of the graph of plans that overlap
in time, where a colour costs what its largest plan needs (max-coloring, Pemmaraju et al., "Buffer
minimization using max-coloring"): first fit, the largest plan first.

A segment that is too small is freed before a larger one is allocated, and one that no living plan needs so
large is freed as soon as it is idle. What ends a claim or a plan may be the garbage collector, in any thread
and at any moment, so a release never waits for the pool's lock: whoever holds the lock tidies up afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from olla_fx import arena
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
        self._overlaps: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        self._colours: weakref.WeakKeyDictionary[Any, int] | None = None

    def want(self, plan_owner: object, buffer_bytes: int) -> None:
        """Note the bytes that the plan of an owner needs, as long as that owner lives; forget its arena."""
        with self._locked():
            if plan_owner not in self._wanted:
                self._overlaps[plan_owner] = weakref.WeakSet()
                weakref.finalize(plan_owner, self._tidy_after_change).atexit = False
            self._wanted[plan_owner] = buffer_bytes
            for segment in self._segments:
                if plan_owner in segment.arenas:
                    segment.arenas[plan_owner] = None
        self._tidy_after_change()

    def attend(self, plan_owner: object) -> Claim:
        """Note that a run has begun that needs no segment; its plan will not share with what runs now."""
        with self._locked():
            self._note_overlaps(plan_owner)
            return self._enter(plan_owner, None)

    def claim(self, plan_owner: object) -> Claim:
        """Claim a segment for a run; never waits for another run.

        Args:
            plan_owner: the caller of :meth:`want`.

        Raises:
            MemoryError: if the device has not enough memory.
        """
        with self._locked():
            self._note_overlaps(plan_owner)
            if self._dropped:
                self._free_dropped()
            segment = self._home(plan_owner)
            if segment is None:
                segment = self._segment_for(plan_owner)
                self._move(plan_owner, segment)
            segment.note_thread()
            return self._enter(plan_owner, segment)

    def release(self, claim: Claim) -> None:
        """End a claim; may be called at any moment, by the garbage collector, too."""
        self._claims.discard(claim)
        if claim.segment is not None and claim.segment.is_untidy:
            self._tidy()

    def fits(self, claim: Claim, plan_owner: object) -> bool:
        """Return True if a claim is good for a run of this owner's plan."""
        segment = claim.segment
        return (
            segment is not None
            and claim.plan_owner() is plan_owner
            and segment.buffer_bytes >= self._wanted[plan_owner]
        )

    def poison(self, byte: int = 0xFF) -> None:
        """Overwrite all free segments, to show that no step depends on what an earlier one left."""
        with self._locked():
            for segment in self._free():
                segment.vacate()
                if segment.buffer is not None and not segment.outstanding_blocks:
                    segment.buffer.poison(byte)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._is_untidy:
                self._tidy()

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
            segment.is_too_large = largest is None or segment.buffer_bytes > self._wanted[largest]
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
        overlaps = self._overlaps[plan_owner]
        for claim in self._claims.copy():
            other = claim.plan_owner()
            if other is not None and other is not plan_owner and other not in overlaps:
                overlaps.add(other)
                self._overlaps[other].add(plan_owner)
                self._colours = None
                self._is_untidy = True

    def _enter(self, plan_owner: object, segment: Segment | None) -> Claim:
        claim = Claim(weakref.ref(plan_owner), segment)
        self._claims.add(claim)
        return claim

    def _home(self, plan_owner: object) -> Segment | None:
        """Return the segment of the owner's last run, if it is free and all plans are where they belong."""
        if self._is_settled and not self._is_untidy:
            for segment in self._segments:
                if plan_owner in segment.arenas:
                    is_large_enough = segment.buffer_bytes >= self._wanted[plan_owner]
                    return segment if is_large_enough and self._is_usable(segment) else None
        return None

    def _is_usable(self, segment: Segment) -> bool:
        if any(claim.segment is segment for claim in self._claims.copy()):
            return False
        segment.vacate()
        return segment.outstanding_blocks == 0

    def _free_dropped(self) -> None:
        """Move gradients out of dropped segments, whose memory goes with the last block that is alive."""
        for segment in self._dropped:
            segment.vacate()
        self._dropped = [segment for segment in self._dropped if segment.holds_gradients]

    def _move(self, plan_owner: object, segment: Segment) -> None:
        """Make a segment the home of an owner."""
        for other in self._segments:
            if other is not segment:
                other.arenas.pop(plan_owner, None)
        segment.arenas.setdefault(plan_owner, None)
        self._is_untidy = True

    def _segment_for(self, plan_owner: object) -> Segment:
        """Return the free segment of the owner's colour; a new one in its place if it is too small.

        A segment has the colour of its largest plan. One in which a block of an earlier run is still alive,
        as an error's traceback may keep it, is left alone.
        """
        needed_bytes = self._wanted[plan_owner]
        colours = self._colours_of_plans()
        segments = []
        for segment in self._segments:
            largest = self._largest_user(segment)
            same_colour = largest is not None and colours[largest] == colours[plan_owner]
            if same_colour and self._is_usable(segment):
                segments.append(segment)
        for segment in segments:
            if segment.buffer_bytes >= needed_bytes:
                return segment
        for segment in segments:
            self._drop(segment)
        try:
            segment = Segment(self._allocate(needed_bytes))
        except MemoryError:
            for unused in self._free():
                if not unused.outstanding_blocks:
                    self._drop(unused)
            segment = Segment(self._allocate(needed_bytes))
        self._segments.append(segment)
        return segment

    def _colours_of_plans(self) -> weakref.WeakKeyDictionary[Any, int]:
        """Return a number for each owner; those whose plans share a segment have the same."""
        colours = self._colours
        if colours is None:
            colours = self._colours = weakref.WeakKeyDictionary()
            for owner in sorted(self._wanted, key=self._wanted.__getitem__, reverse=True):
                taken = {colours.get(other) for other in self._overlaps[owner]}
                colours[owner] = next(colour for colour in itertools.count() if colour not in taken)
        return colours

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


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """A run under way.

    Attributes:
        plan_owner: whose plan runs.
        segment: what it holds; None for a run on the stock allocator.
    """

    plan_owner: weakref.ref[Any]
    segment: Segment | None


_pools: dict[torch.device, BufferPool] = {}


def pool_of(device: torch.device) -> BufferPool:
    """Return the one pool of a device."""
    return _pools.setdefault(device, BufferPool(device))
