"""What a choice of transfers makes of a step: its load, and by the simulator its seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from olla_solvers.errors import OptionError
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.simulate import Simulation, simulate_settled
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link, Transfer, away_bytes

LEAST_BYTES = 1 << 20
"""Smaller arrays stay: they make little room, and each copy has its latency (AutoSwap, section IV-A)."""


@dataclass(frozen=True)
class SwapPlan:
    """A step with transfers.

    Attributes:
        transfers: of copies that are asked for at the same boundary, the first comes first.
        load_bytes: of each timestep.
        simulation: of the step's time.
    """

    transfers: tuple[Transfer, ...]
    load_bytes: tuple[Bytes, ...]
    simulation: Simulation

    @property
    def peak_bytes(self) -> Bytes:
        """The largest load."""
        return max(self.load_bytes, default=0)

    @property
    def extra_seconds(self) -> Seconds:
        """What swapping adds to the step's time: all stalls."""
        return self.simulation.stalled_seconds


Planner: TypeAlias = Callable[[TimedStep, Bytes, Link], SwapPlan]
"""Returns a plan whose peak is within a limit of bytes; if it has none, that of the smallest peak known."""


def plan_of(step: TimedStep, transfers: Sequence[Transfer], link: Link) -> SwapPlan:
    """Return what transfers make of a step.

    Args:
        step: any.
        transfers: of its arrays.
        link: which copies.

    Raises:
        ProblemError: if a transfer has no time in the step.
    """
    sizes = [step.problem.arrays[transfer.array].size_bytes for transfer in transfers]
    simulation = simulate_settled(step.durations, transfers, sizes, link)
    away = np.array(away_bytes(transfers, sizes, step.length), dtype=np.int64)
    load = step.load_bytes - away
    return SwapPlan(tuple(transfers), tuple(map(int, load)), simulation)


def check_limit(limit_bytes: Bytes) -> None:
    """Check a limit of the load.

    Raises:
        OptionError: if it is below 0.
    """
    if limit_bytes < 0:
        raise OptionError(f"no load is below 0: a limit of {limit_bytes} B makes no sense")
