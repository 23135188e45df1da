"""What a sequence of executions takes, timestep by timestep, and where arrays wait unread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from olla_solvers.problem import ArrayKind, Bytes, Timestep
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Execution, Seconds
from olla_solvers.recomputation.published.sequence import resident_bytes, versions_read
from olla_solvers.swapping.gaps import Gap, gaps_of


@dataclass(frozen=True)
class Timeline:
    """A sequence of executions without swapping.

    Attributes:
        executions: in sequence.
        seconds: of each.
        resident_bytes: of each: everything alive, and the workspace.
        gaps: of all arrays that may be elsewhere, ascending; those across two steps, too.
    """

    executions: tuple[Execution, ...]
    seconds: tuple[Seconds, ...]
    resident_bytes: tuple[Bytes, ...]
    gaps: tuple[Gap, ...]

    @cached_property
    def begins(self) -> list[Seconds]:
        """Seconds from the step's beginning at which each timestep begins if nothing stalls; and the end."""
        return [0.0, *accumulate(self.seconds)]

    @cached_property
    def peak_bytes(self) -> Bytes:
        """Most bytes alive at once."""
        return max(self.resident_bytes, default=0)


def timeline(instance: Instance, executions: Sequence[Execution]) -> Timeline:
    """Return the timeline of a sequence.

    Args:
        instance: the step.
        executions: what runs; every source has run before.
    """
    problem = instance.problem
    seconds = tuple(
        problem.repetition_seconds[execution.operator]
        if execution.copy
        else problem.seconds[execution.operator]
        for execution in executions
    )
    resident = tuple(resident_bytes(instance, executions))
    return Timeline(tuple(executions), seconds, resident, tuple(_gaps(instance, executions)))


def _gaps(instance: Instance, executions: Sequence[Execution]) -> list[Gap]:
    problem, length = instance.problem, len(executions)
    arrays = problem.problem.arrays
    accesses: dict[ArrayIndex, list[Timestep]] = {}
    for timestep, execution in enumerate(executions):
        if not execution.copy:
            for array in instance.makes[execution.operator]:
                accesses[array] = [timestep]
        for array, copy in versions_read(instance, execution):
            if not copy:
                accesses.setdefault(array, []).append(timestep)
        for array in instance.lent[execution.operator]:
            accesses.setdefault(array, []).append(timestep)
    return sorted(
        gap
        for array, timesteps in accesses.items()
        if arrays[array].size_bytes and (arrays[array].kind is ArrayKind.PLANNED or array in problem.lent)
        for gap in gaps_of(
            array,
            arrays[array].size_bytes,
            timesteps,
            length if array in problem.lent - problem.renewed else None,
        )
    )
