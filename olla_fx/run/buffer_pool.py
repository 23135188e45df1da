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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla_fx import arena


class BufferPool:
    """The segments of a device, and the plans that run in them; a plan is known by its owner."""

    def __init__(self, device: torch.device) -> None:
        """Start without memory; see :func:`pool_of`."""
        self._device = device
        self._lock = threading.Lock()
        self._is_untidy = self._is_settled = False
        self._segments: list[_Segment] = []
        self._claims: set[_Claim] = set()
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

    def attend(self, plan_owner: object) -> _Claim:
        """Note that a run has begun that needs no segment; its plan will not share with what runs now."""
        with self._locked():
            self._note_overlaps(plan_owner)
            return self._enter(plan_owner, None)

    def claim(self, plan_owner: object) -> _Claim:
        """Claim a segment for a run; never waits for another run.

        Args:
            plan_owner: the caller of :meth:`want`.

        Raises:
            MemoryError: if the device has not enough memory.
        """
        with self._locked():
            self._note_overlaps(plan_owner)
            segment = self._home(plan_owner)
            if segment is None:
                segment = self._segment_for(plan_owner)
                self._move(plan_owner, segment)
            return self._enter(plan_owner, segment)

    def release(self, claim: _Claim) -> None:
        """End a claim; may be called at any moment, by the garbage collector, too."""
        self._claims.discard(claim)
        if claim.segment is not None and claim.segment.is_untidy:
            self._tidy()

    def fits(self, claim: _Claim, plan_owner: object) -> bool:
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

    def _free(self) -> list[_Segment]:
        held = {claim.segment for claim in self._claims.copy()}
        return [segment for segment in self._segments if segment not in held]

    def _largest_user(self, segment: _Segment) -> Any:
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

    def _enter(self, plan_owner: object, segment: _Segment | None) -> _Claim:
        claim = _Claim(weakref.ref(plan_owner), segment)
        self._claims.add(claim)
        return claim

    def _home(self, plan_owner: object) -> _Segment | None:
        """Return the segment of the owner's last run, if it is free and all plans are where they belong."""
        if self._is_settled and not self._is_untidy:
            for segment in self._segments:
                if plan_owner in segment.arenas:
                    is_large_enough = segment.buffer_bytes >= self._wanted[plan_owner]
                    return segment if is_large_enough and self._is_usable(segment) else None
        return None

    def _is_usable(self, segment: _Segment) -> bool:
        if any(claim.segment is segment for claim in self._claims.copy()):
            return False
        segment.vacate()
        return segment.outstanding_blocks == 0

    def _move(self, plan_owner: object, segment: _Segment) -> None:
        """Make a segment the home of an owner."""
        for other in self._segments:
            if other is not segment:
                other.arenas.pop(plan_owner, None)
        segment.arenas.setdefault(plan_owner, None)
        self._is_untidy = True

    def _segment_for(self, plan_owner: object) -> _Segment:
        """Return the free segment of the owner's colour; a new one in its place if it is too small.

        A segment has the colour of its largest plan. One in which a block of an earlier run is still alive,
        as an error's traceback may keep it, is left alone.
        """
        needed_bytes = self._wanted[plan_owner]
        colours = self._colours_of_plans()
        segments = []
        for segment in filter(self._is_usable, self._segments):
            largest = self._largest_user(segment)
            if largest is not None and colours[largest] == colours[plan_owner]:
                segments.append(segment)
        for segment in segments:
            if segment.buffer_bytes >= needed_bytes:
                return segment
        for segment in segments:
            self._drop(segment)
        try:
            segment = _Segment(self._allocate(needed_bytes))
        except MemoryError:
            for unused in self._free():
                unused.vacate()
                self._drop(unused)
            segment = _Segment(self._allocate(needed_bytes))
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

    def _drop(self, segment: _Segment) -> None:
        """Free a segment at once, whoever refers to it."""
        self._segments.remove(segment)
        segment.arenas.clear()
        segment.buffer = None


class _Segment:
    """One buffer of a pool.

    Attributes:
        buffer: None once it was freed.
        colour: of the largest plan whose last run was here.
        is_too_large: True if none of these plans needs so much.
        is_untidy: True if it is too large, or some of these plans have another colour.
        buffer_bytes: its size.
        arenas: serve the plans whose last run was here, by owner; None until an owner's next run makes it.

    Gradients that a backward has left in it are moved out if another run needs it: they are the caller's, and
    may stay until the next backward or be cleared before.
    """

    def __init__(self, buffer: arena.Buffer) -> None:
        """Take over a buffer."""
        self.buffer: arena.Buffer | None = buffer
        self.buffer_bytes = buffer.buffer_bytes
        self.colour: int | None = None
        self.is_too_large = self.is_untidy = False
        self.arenas: weakref.WeakKeyDictionary[Any, arena.Arena | None] = weakref.WeakKeyDictionary()
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self._left_by: int | None = None

    @property
    def outstanding_blocks(self) -> int:
        """The number of blocks in it that are alive."""
        return 0 if self.buffer is None else self.buffer.outstanding_blocks

    def leave_gradients(self, leaves: Sequence[torch.Tensor]) -> None:
        """Note whose ``.grad`` this thread is going to leave in here."""
        self._left_by = threading.get_ident()
        self._leaves = [weakref.ref(leaf) for leaf in leaves]

    def vacate(self) -> None:
        """Move gradients that lie in here to memory of their own, unless another thread may be using them."""
        if self.buffer is None or self._left_by != threading.get_ident() or not self.outstanding_blocks:
            return
        leaves = [leaf for leaf in (reference() for reference in self._leaves) if leaf is not None]
        self._leaves = []
        with torch.inference_mode(False), torch.no_grad():
            for gradient in (leaf.grad for leaf in leaves):
                if gradient is not None and self.buffer.contains(gradient.untyped_storage().data_ptr()):
                    gradient.data = gradient.clone()


@dataclass(frozen=True, eq=False, slots=True)
class _Claim:
    """A run under way.

    Attributes:
        plan_owner: whose plan runs.
        segment: what it holds; None for a run on the stock allocator.
    """

    plan_owner: weakref.ref[Any]
    segment: _Segment | None


_pools: dict[torch.device, BufferPool] = {}


def pool_of(device: torch.device) -> BufferPool:
    """Return the one pool of a device."""
    return _pools.setdefault(device, BufferPool(device))


class Turn:
    """Lets one run of a module at a time hold a segment.

    An RNN's cell runs a hundred times before the first backward: a segment of the whole plan's size for each
    run would cost more than eager needs.
    """

    def __init__(self) -> None:
        """Start with nobody's turn."""
        self._taken = threading.Lock()

    def lease(self, *, wait: bool) -> Lease | None:
        """Take the turn for one run.

        Args:
            wait: True to wait until the run before is over; False to return None if it is not.
        """
        return Lease(self._taken) if self._taken.acquire(blocking=wait) else None

    @property
    def is_taken(self) -> bool:
        """True if a run is under way."""
        return self._taken.locked()


class Lease:
    """A module's turn and the segment that its run holds; given up when released or no longer referred to."""

    def __init__(self, taken: threading.Lock | None, lender: Lease | None = None) -> None:
        """Take over a turn; see :meth:`Turn.lease`."""
        self._taken = taken
        self._lender = lender
        self._pool: BufferPool | None = None
        self._claim: _Claim | None = None

    def attend(self, pool: BufferPool, plan_owner: object) -> None:
        """Tell the pool of a run that needs no segment."""
        self._give_back()
        self._pool, self._claim = pool, pool.attend(plan_owner)

    def arena(
        self, pool: BufferPool, plan_owner: object, make: Callable[[arena.Buffer], arena.Arena]
    ) -> arena.Arena:
        """Return the arena that serves an owner's plan, in a segment that is held from now on.

        Args:
            pool: of the device.
            plan_owner: the caller of the pool's ``want``; its arena is made anew after that call.
            make: puts the plan's requests into a buffer.

        Raises:
            MemoryError: if the device has not enough memory.
        """
        if self._lender is not None:
            return self._lender.arena(pool, plan_owner, make)
        if self._claim is None or not pool.fits(self._claim, plan_owner):
            self._give_back()
            self._pool, self._claim = pool, pool.claim(plan_owner)
        segment = self._claim.segment
        if segment is None or segment.buffer is None:
            raise RuntimeError("a segment was freed while a run held it")
        served_by = segment.arenas.get(plan_owner)
        if served_by is None:
            served_by = segment.arenas[plan_owner] = make(segment.buffer)
        return served_by

    def leave_gradients(self, leaves: Sequence[torch.Tensor]) -> None:
        """Say whose ``.grad`` will lie in the segment when it is given back."""
        if self._claim is not None and self._claim.segment is not None:
            self._claim.segment.leave_gradients(leaves)

    def lend(self) -> Lease:
        """Return a lease for a run within this one's: it runs in the same segment and gives nothing back."""
        return Lease(None, self)

    def release(self) -> None:
        """Give segment and turn back; once only."""
        self._give_back()
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.release()

    def _give_back(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None and self._pool is not None:
            self._pool.release(claim)

    def __del__(self) -> None:
        """End a run whose graph the caller dropped."""
        self.release()
