"""The plan that a game ends with, by the evaluator and the simulator that all planners share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds
from olla_solvers.swapping.simulate import simulate
from olla_solvers.swapping.transfers import Link, Transfer, away_bytes


@dataclass(frozen=True)
class SwappedStep:
    """A step in which arrays are made again, and others wait in host memory.

    Attributes:
        recomputation: the sequence that runs; its peak is that of all arrays on the device.
        transfers: in timesteps of that sequence.
        peak_bytes: most bytes of planned arrays and workspaces on the device at once.
        seconds: of the step: operators, repetitions and stalls.
        extra_seconds: beyond the step as it was given.
    """

    recomputation: Recomputation
    transfers: tuple[Transfer, ...]
    peak_bytes: Bytes
    seconds: Seconds
    extra_seconds: Seconds


def swapped_step(
    problem: RecomputationProblem,
    recomputation: Recomputation,
    resident_bytes: Sequence[Bytes],
    transfers: Sequence[Transfer],
    link: Link,
) -> SwappedStep:
    """Return what transfers make of a sequence, by the simulator.

    Args:
        problem: the step.
        recomputation: the sequence.
        resident_bytes: of each of its timesteps if nothing is away.
        transfers: what is away.
        link: which copies.

    Raises:
        ProblemError: if a transfer has no time in the sequence.
    """
    sizes = [problem.problem.arrays[transfer.array].size_bytes for transfer in transfers]
    durations = [
        (problem.repetition_seconds if execution.copy else problem.seconds)[execution.operator]
        for execution in recomputation.executions
    ]
    simulation = simulate(durations, transfers, sizes, link)
    away = np.array(away_bytes(transfers, sizes, len(durations)), dtype=np.int64)
    return SwappedStep(
        recomputation,
        tuple(transfers),
        int(np.max(np.array(resident_bytes, dtype=np.int64) - away, initial=0)),
        simulation.seconds,
        simulation.seconds - problem.step_seconds,
    )
