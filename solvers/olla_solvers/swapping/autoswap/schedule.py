"""Schedules the copies of selected arrays (AutoSwap, section IV-E).

Copies out begin right after the access before, in ascending order of it; copies in are scheduled backwards
from the access after, each as late as it may be to stall nothing. In each direction one follows the other.
Then one walk over the steps keeps the load within its limit: a copy in waits until there is room, and where
an operator's arrays would pass the limit, it waits for copies out. An array that is needed again before it is
gone stays, and is not copied.

Three steps are walked, so that the second finds the link as the first leaves it, and its decisions are taken.
"""

from __future__ import annotations

import collections
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.gaps import Gap, Loads, remove
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link, Transfer

_WALKED, _TAKEN = 3, 1
"""So many steps are walked, and this one's decisions are taken."""


def schedule(
    step: TimedStep,
    gaps: Sequence[Gap],
    limit_bytes: Bytes,
    link: Link,
    starts: Sequence[Timestep] | None = None,
) -> tuple[Transfer, ...]:
    """Return the transfers of selected arrays.

    Args:
        step: whose arrays these are.
        gaps: in which the arrays are to be away, one at most for each array.
        limit_bytes: of the load. One below what these gaps allow is raised to that.
        link: which copies.
        starts: for each gap the boundary from which its array may be copied in; None for the latest that
            stalls nothing.
    """
    limit_bytes = max(limit_bytes, int(step.load_without(gaps).max(initial=0)))
    starts = latest_starts(step, gaps, link) if starts is None else starts
    stays = _Walk(step, gaps, starts, limit_bytes, link).run()
    _keep_limit(step, stays, limit_bytes)
    transfers = [
        Transfer(stay.gap.out_after, stay.gone, stay.back, stay.gap.back_before, stay.gap.array)
        for stay in stays
        if stay.gone < stay.back
    ]
    # Of copies in that are asked for at the same boundary, the one that is needed first comes first.
    return tuple(sorted(transfers, key=lambda transfer: transfer.back_before - transfer.back_from))


def latest_starts(step: TimedStep, gaps: Sequence[Gap], link: Link) -> list[Timestep]:
    """Return for each gap the last boundary from which a copy in is done in time if nothing else stalls.

    Args:
        step: whose arrays these are.
        gaps: at their ends the arrays are needed.
        link: copies them in one after the other.
    """
    length, begins = step.length, step.begins
    by_access = sorted(range(len(gaps)), key=lambda index: gaps[index].back_before % length)
    starts = [0] * len(gaps)
    free = np.inf
    # From the end of the third step backwards; what the second needs is taken.
    for later in (2, 1):
        for index in reversed(by_access):
            gap = gaps[index]
            needed = gap.back_before % length + later * length
            free = min(begins[needed], free) - link.in_seconds(gap.size_bytes)
            boundary = min(max(bisect_right(begins, free) - 1, 0), needed)
            starts[index] = max(gap.back_before - (needed - boundary), gap.out_after + 1)
    return starts


@dataclass(eq=False)
class _WalkedGap:
    """A gap in one of the walked steps, and when its array is on the host.

    Attributes:
        gap: in which it is.
        first, second: the gap's accesses, counted from the first walked step.
        start: the boundary from which it may be copied in.
        gone: the boundary from which its memory is free.
        back: the boundary from which its memory is needed again; if that is not after ``gone``, it stays.
        out_end: when its copy out is done.
    """

    gap: Gap
    first: Timestep
    second: Timestep
    start: Timestep
    gone: Timestep
    back: Timestep
    out_end: Seconds = 0.0


class _Walk:
    """Walks steps with the clocks of operators and link, and decides when arrays are gone and back."""

    def __init__(
        self,
        step: TimedStep,
        gaps: Sequence[Gap],
        starts: Sequence[Timestep],
        limit_bytes: Bytes,
        link: Link,
    ) -> None:
        self._step = step
        self._limit_bytes = limit_bytes
        self._link = link
        self._load: list[Bytes] = np.tile(step.load_bytes, _WALKED).tolist()
        pairs = list(zip(gaps, starts, strict=True))
        self._stays = [
            [
                _WalkedGap(
                    gap,
                    gap.out_after + past,
                    gap.back_before + past,
                    start + past,
                    gap.back_before + past,
                    gap.back_before + past,
                )
                for gap, start in pairs
            ]
            for past in range(0, _WALKED * step.length, max(step.length, 1))
        ]
        every = [stay for stays in self._stays for stay in stays]
        self._by_first: dict[Timestep, list[_WalkedGap]] = collections.defaultdict(list)
        for stay in every:
            self._by_first[stay.first].append(stay)
        self._to_come = collections.deque(sorted(every, key=lambda stay: stay.second))
        self._begin_where_there_is_room()
        self._leaving: collections.deque[_WalkedGap] = collections.deque()
        self._away_bytes = 0
        self._now = self._out_free = self._in_free = 0.0

    def run(self) -> list[_WalkedGap]:
        """Return the stays of the step whose decisions are taken, counted from its beginning."""
        for timestep in range(len(self._load)):
            for stay in self._by_first.get(timestep - 1, ()):
                self._out_free = max(self._now, self._out_free) + self._link.out_seconds(stay.gap.size_bytes)
                stay.out_end = self._out_free
                self._leaving.append(stay)
            while self._leaving and self._leaving[0].out_end <= self._now:
                self._leave(timestep)
            returning = self._return(timestep)
            while self._leaving and self._resident_bytes(timestep) > self._limit_bytes:
                self._leave(timestep)
            for stay in returning:
                self._in_free = max(self._now, self._in_free) + self._link.in_seconds(stay.gap.size_bytes)
                if stay.second == timestep:
                    self._now = max(self._now, self._in_free)
            self._now += self._step.durations[timestep % self._step.length]
        past = _TAKEN * self._step.length
        for stay in self._stays[_TAKEN] if self._stays else ():
            stay.gone, stay.back = stay.gone - past, stay.back - past
        return self._stays[_TAKEN] if self._stays else []

    def _begin_where_there_is_room(self) -> None:
        """Put off copies in until no load to come passes the limit, if all others stay away if they can."""
        floor: Loads = np.array(self._load, dtype=np.int64)
        for stay in self._to_come:
            floor[stay.first + 1 : stay.second] -= stay.gap.size_bytes
        earliest = 0
        for stay in self._to_come:
            start = max(stay.start, earliest)
            crowded = np.flatnonzero(floor[start : stay.second] + stay.gap.size_bytes > self._limit_bytes)
            stay.start = earliest = start + int(crowded[-1]) + 1 if len(crowded) else start
            floor[stay.start : stay.second] += stay.gap.size_bytes

    def _leave(self, timestep: Timestep) -> None:
        """Wait for the copy out that is done next."""
        stay = self._leaving.popleft()
        self._now = max(self._now, stay.out_end)
        stay.gone = timestep
        self._away_bytes += stay.gap.size_bytes

    def _return(self, timestep: Timestep) -> list[_WalkedGap]:
        """Give those arrays memory again that may come back, and return those that must be copied in."""
        returning = []
        while self._to_come and self._to_come[0].start <= timestep:
            stay = self._to_come[0]
            is_leaving = stay in self._leaving
            needed_bytes = self._resident_bytes(timestep) + (0 if is_leaving else stay.gap.size_bytes)
            if stay.second > timestep and needed_bytes > self._limit_bytes:
                break
            self._to_come.popleft()
            stay.back = timestep
            if is_leaving:
                self._leaving.remove(stay)
            else:
                self._away_bytes -= stay.gap.size_bytes
                returning.append(stay)
        return returning

    def _resident_bytes(self, timestep: Timestep) -> Bytes:
        return self._load[timestep] - self._away_bytes


def _keep_limit(step: TimedStep, stays: Sequence[_WalkedGap], limit_bytes: Bytes) -> None:
    """Let arrays be away as long as they can be where the load would pass the limit.

    The walked steps may differ a little, so that one step's decisions, repeated in each, need this at times.
    """
    load = step.load_bytes.copy()
    for stay in stays:
        remove(load, stay.gone, stay.back, stay.gap.size_bytes)
    for timestep in np.flatnonzero(load > limit_bytes).tolist():
        for stay in stays:
            moment = stay.gap.moment_of(timestep, step.length)
            is_there = moment is not None and not stay.gone <= moment < stay.back
            if is_there and load[timestep] > limit_bytes:
                remove(load, stay.gone, stay.back, -stay.gap.size_bytes)
                stay.gone, stay.back = stay.gap.out_after + 1, stay.gap.back_before
                remove(load, stay.gone, stay.back, stay.gap.size_bytes)
