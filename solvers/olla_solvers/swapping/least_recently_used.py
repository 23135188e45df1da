"""Swaps the least recently used arrays on demand, as SuperNeurons' cache does.

When an operator's arrays would pass the limit, what was accessed longest ago is copied out, and the operator
waits for it; an array on the host is copied in when an operator accesses it, which waits, too. Nothing is
fetched ahead. AutoSwap swaps so before it knows the step (Zhang et al., "Efficient Memory Management for
GPU-based Deep Learning Systems", section V), and Chen, "GPU Memory Management for Neural Networks using Deep
Q-Network", section 5.1, describes SuperNeurons so (Wang et al., "SuperNeurons: Dynamic GPU Memory Management
for Training Deep Neural Networks", PPoPP 2018).
"""

from __future__ import annotations

from olla_solvers.errors import NoSolutionError
from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import ArrayIndex
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.plan import LEAST_BYTES, SwapPlan, check_limit, plan_of
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link, Transfer

_MOST_STEPS = 50
"""Some steps after the first, each begins with what the one before began with."""


def least_recently_used(
    step: TimedStep, limit_bytes: Bytes, link: Link, *, least_bytes: Bytes = LEAST_BYTES
) -> SwapPlan:
    """Plan a step by copying the least recently used arrays out on demand.

    Args:
        step: any.
        limit_bytes: of the load.
        link: which copies.
        least_bytes: smaller arrays stay.

    Returns:
        A plan within the limit; if an operator's own arrays and what is never copied pass it, one that
        copies all else out then.

    Raises:
        NoSolutionError: if what is on the host between two steps never repeats.
    """
    check_limit(limit_bytes)
    cache = _Cache(step, limit_bytes, least_bytes)
    away: frozenset[ArrayIndex] = frozenset()
    for _ in range(_MOST_STEPS):
        transfers = cache.run_step()
        before, away = away, cache.away
        if before == away and cache.is_warm:
            return plan_of(step, transfers, link)
    raise NoSolutionError(
        f"what waits on the host between two steps was another set in each of {_MOST_STEPS} steps, so that "
        f"no list of copies serves every step. Choose another limit than {limit_bytes} B"
    )


class _Cache:
    """The device's memory as a cache of arrays, over one step after the other."""

    def __init__(self, step: TimedStep, limit_bytes: Bytes, least_bytes: Bytes) -> None:
        self._step = step
        self._limit_bytes = limit_bytes
        arrays = step.problem.arrays
        # When each array was accessed last, counted over all steps.
        self._last = {
            index: -1
            for index, gaps in enumerate(step.gaps)
            if gaps and arrays[index].size_bytes >= least_bytes
        }
        self._accessed: list[list[ArrayIndex]] = [[] for _ in range(step.length)]
        for index in self._last:
            for timestep in step.accesses[index]:
                self._accessed[timestep].append(index)
        self._steps = 0
        self._away: set[ArrayIndex] = set()

    @property
    def away(self) -> frozenset[ArrayIndex]:
        """What is on the host."""
        return frozenset(self._away)

    @property
    def is_warm(self) -> bool:
        """True if a step began with all arrays accessed before."""
        return self._steps > 1

    def run_step(self) -> list[Transfer]:
        """Run a step and return its transfers, from when an array is copied out."""
        length = self._step.length
        transfers: list[Transfer] = []
        for timestep in range(length):
            self._away.difference_update(self._accessed[timestep])
            self._make_room(timestep, transfers)
            for index in self._accessed[timestep]:
                self._last[index] = self._steps * length + timestep
        self._steps += 1
        return transfers

    def _make_room(self, timestep: Timestep, transfers: list[Transfer]) -> None:
        arrays, length = self._step.problem.arrays, self._step.length
        load = int(self._step.load_bytes[timestep]) - sum(arrays[index].size_bytes for index in self._away)
        if load <= self._limit_bytes:
            return
        for index in sorted(self._last, key=lambda index: self._last[index]):
            if load <= self._limit_bytes:
                return
            if index in self._away:
                continue
            for gap in self._step.gaps[index]:
                moment = gap.moment_of(timestep, length)
                if moment is not None:
                    self._away.add(index)
                    load -= gap.size_bytes
                    transfers.append(_on_demand(gap, moment, length))


def _on_demand(gap: Gap, moment: Timestep, length: int) -> Transfer:
    """Return the transfer of an array whose memory is needed at a moment of its gap."""
    past = length if moment > length else 0
    back = gap.back_before - past
    return Transfer(moment - 1 - past, moment - past, back, back, gap.array)
