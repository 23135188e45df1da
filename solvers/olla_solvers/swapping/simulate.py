"""Simulates the seconds of a step whose arrays are swapped: one stream that computes and two that copy.

Operators run one after the other; so do the copies of each direction, in the sequence in which they are asked
for. A wait stalls the operators until its copy is done. Nothing else does: asking takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.transfers import Link, Transfer, check

STEPS = 4
"""So many steps are simulated if something waits from one to the next: that has settled in the last one."""


@dataclass(frozen=True)
class Simulation:
    """A step's time.

    Attributes:
        seconds: from the step's beginning to its last operator's end.
        stalls: for each timestep the seconds for which copies were waited for in front of it.
        out_spans: for each transfer the seconds from the step's beginning at which its copy out begins and
            ends.
        in_spans: the same of its copy in; of the one asked for in the step before, if it reaches into this.
    """

    seconds: Seconds
    stalls: tuple[Seconds, ...]
    out_spans: tuple[tuple[Seconds, Seconds], ...]
    in_spans: tuple[tuple[Seconds, Seconds], ...]

    @property
    def stalled_seconds(self) -> Seconds:
        """All stalls together."""
        return sum(self.stalls)


def simulate(
    seconds: Sequence[Seconds],
    transfers: Sequence[Transfer],
    sizes: Sequence[Bytes],
    link: Link,
    *,
    steps: int = 1,
) -> Simulation:
    """Simulate steps and return the last one's time.

    Args:
        seconds: of each timestep's operator.
        transfers: what is swapped; of copies that are asked for at the same boundary, the first comes first.
        sizes: of each transfer's array.
        link: which copies.
        steps: how many of the same sequence, one after the other. Transfers that reach into the next step
            matter from the second on, and settle after a few more.

    Raises:
        ProblemError: if a transfer has no time in the step.
    """
    check(transfers, len(seconds))
    simulator = _Simulator(seconds, transfers, sizes, link)
    for _ in range(steps):
        simulator.run_step()
    return simulator.last


def simulate_settled(
    seconds: Sequence[Seconds], transfers: Sequence[Transfer], sizes: Sequence[Bytes], link: Link
) -> Simulation:
    """Simulate as many steps as there must be for what waits from one to the next, and return the last one.

    Args:
        seconds: of each timestep's operator.
        transfers: what is swapped; of copies that are asked for at the same boundary, the first comes first.
        sizes: of each transfer's array.
        link: which copies.

    Raises:
        ProblemError: if a transfer has no time in the step.
    """
    goes_on = any(transfer.back_before >= len(seconds) for transfer in transfers)
    return simulate(seconds, transfers, sizes, link, steps=STEPS if goes_on else 1)


class _Simulator:
    """The clocks of operators and of both directions of the link.

    Attributes:
        last: the last step that was run.
    """

    last: Simulation

    def __init__(
        self, seconds: Sequence[Seconds], transfers: Sequence[Transfer], sizes: Sequence[Bytes], link: Link
    ) -> None:
        length = len(seconds)
        self._seconds = seconds
        self._out_seconds = [link.out_seconds(size) for size in sizes]
        self._in_seconds = [link.in_seconds(size) for size in sizes]
        self._now = 0.0
        self._out_free = 0.0
        self._in_free = 0.0
        self._steps = 0
        self._out_spans = [(0.0, 0.0)] * len(transfers)
        self._in_spans = [(0.0, 0.0)] * len(transfers)
        self._begins_out = _by_timestep([transfer.out_after for transfer in transfers], length)
        self._waits_out = _by_timestep([transfer.gone_before for transfer in transfers], length)
        self._begins_in = _by_timestep([transfer.back_from for transfer in transfers], length)
        self._waits_in = _by_timestep([transfer.back_before for transfer in transfers], length)

    def run_step(self) -> None:
        began = self._now
        stalls = []
        for timestep, seconds in enumerate(self._seconds):
            reached = self._now
            self._cross(timestep)
            stalls.append(self._now - reached)
            self._now += seconds
            for transfer, _ in self._begins_out.get(timestep, ()):
                start = max(self._now, self._out_free)
                self._out_free = start + self._out_seconds[transfer]
                self._out_spans[transfer] = start, self._out_free
        self._steps += 1
        self.last = Simulation(
            self._now - began,
            tuple(stalls),
            tuple((start - began, end - began) for start, end in self._out_spans),
            tuple((start - began, end - began) for start, end in self._in_spans),
        )

    def _cross(self, timestep: Timestep) -> None:
        """Cross the boundary in front of a timestep."""
        for transfer, steps_later in self._waits_out.get(timestep, ()):
            if steps_later <= self._steps:
                self._now = max(self._now, self._out_spans[transfer][1])
        for transfer, steps_later in self._begins_in.get(timestep, ()):
            if steps_later <= self._steps:
                start = max(self._now, self._in_free)
                self._in_free = start + self._in_seconds[transfer]
                self._in_spans[transfer] = start, self._in_free
        for transfer, steps_later in self._waits_in.get(timestep, ()):
            if steps_later <= self._steps:
                self._now = max(self._now, self._in_spans[transfer][1])


def _by_timestep(timesteps: Sequence[Timestep], length: int) -> dict[Timestep, list[tuple[int, int]]]:
    """Return for each timestep of the step the transfers that name it, and how many steps later they do."""
    named: dict[Timestep, list[tuple[int, int]]] = {}
    for transfer, timestep in enumerate(timesteps):
        named.setdefault(timestep % length, []).append((transfer, timestep // length))
    return named
