"""Lends a planned module's runs segments of the pool, one at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from olla_fx import arena
from olla_fx.arena import LeftGradients
from olla_fx.run.pool.buffer_pool import BufferPool
from olla_fx.run.pool.claim import Claim, Way
from olla_fx.run.pool.segment import Range

MOST_ARENAS = 4
"""Places in a segment at which a plan keeps an arena ready."""


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
        self._claim: Claim | None = None

    def attend(self, pool: BufferPool, plan_owner: object) -> None:
        """Tell the pool of a run that needs no segment."""
        self._give_back()
        self._pool, self._claim = pool, pool.attend(plan_owner)

    def arena(
        self,
        pool: BufferPool,
        plan_owner: object,
        make: Callable[[arena.Buffer, int], arena.Arena],
        *,
        alone: bool = False,
    ) -> arena.Arena:
        """Return the arena that serves an owner's plan, in a part of a segment that is held from now on.

        Args:
            pool: of the device.
            plan_owner: the caller of the pool's ``want``; its arena is made anew after that call.
            make: puts the plan's requests into a buffer, from an address on.
            alone: True if no other run may have a part of the segment meanwhile.

        Raises:
            MemoryError: if the device has not enough memory.
        """
        if self._lender is not None:
            return self._lender.arena(pool, plan_owner, make, alone=alone)
        if self._claim is None or not pool.fits(self._claim, plan_owner):
            self._give_back()
            self._pool, self._claim = pool, pool.claim(plan_owner, alone=alone)
        segment, base = self._claim.segment, self._claim.base
        if segment is None or segment.buffer is None:
            raise RuntimeError("a segment was freed while a run held it")
        arenas = segment.arenas.setdefault(plan_owner, {})
        served_by = arenas.get(base)
        if served_by is None:
            if len(arenas) == MOST_ARENAS:
                arenas.clear()
            served_by = arenas[base] = make(segment.buffer, base)
        return served_by

    def wait(self, held_range: Callable[[], Range]) -> None:
        """Note that the run waits for its caller; see :meth:`BufferPool.wait`."""
        if self._claim is not None and self._pool is not None:
            self._pool.wait(self._claim, held_range)

    def resume(self) -> Way:
        """Note that the run goes on; see :meth:`BufferPool.resume`."""
        return Way.FREE if self._claim is None or self._pool is None else self._pool.resume(self._claim)

    def leave_gradients(self, gradients: LeftGradients, tell_stuck: weakref.WeakMethod[Any]) -> None:
        """Say what the run will leave in the segment when it is given back; see :class:`Segment`."""
        claim = self._claim
        if claim is not None and claim.segment is not None:
            claim.segment.leave_gradients(gradients, claim, tell_stuck)

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
