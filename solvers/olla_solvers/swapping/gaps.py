"""The timesteps between two accesses to an array, at which it may be elsewhere: within a step, or across two.

Steps follow each other, each the same as the one before. A timestep beyond a step's length is one of the next
step, so that what belongs to the caller may be away from its last access of a step to its first of the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.problem import ArrayIndex

Loads: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
"""Bytes for each timestep of a step."""


@dataclass(frozen=True, order=True, slots=True)
class Gap:
    """The timesteps between two accesses to an array, one after the other; at least one.

    Attributes:
        out_after: timestep of the access before; also the array's producer.
        back_before: timestep of the access after; that of the next step if it is not below the step's length.
        array: which; what the step's own operators make of it, not a repetition.
        size_bytes: of the array.
    """

    out_after: Timestep
    back_before: Timestep
    array: ArrayIndex
    size_bytes: Bytes

    def moment_of(self, timestep: Timestep, length: int) -> Timestep | None:
        """Return where in the gap a timestep of a step lies, counted from the step in which the gap begins.

        Args:
            timestep: any of a step.
            length: of the step.

        Returns:
            The timestep, or that of the next step; None if the gap has neither.
        """
        moments = timestep, timestep + length
        return next((moment for moment in moments if self.out_after < moment < self.back_before), None)


def gaps_of(
    array: ArrayIndex, size_bytes: Bytes, accesses: Sequence[Timestep], next_step: int | None = None
) -> list[Gap]:
    """Return the gaps of an array.

    Args:
        array: which.
        size_bytes: of it.
        accesses: to it in a step, ascending.
        next_step: where the next step begins, for an array that it accesses again; None for another.
    """
    accesses = list(accesses)
    if accesses and next_step is not None:
        accesses.append(accesses[0] + next_step)
    pairs = itertools.pairwise(accesses)
    return [Gap(before, after, array, size_bytes) for before, after in pairs if after > before + 1]


def is_across(gaps: Sequence[Gap], length: int) -> bool:
    """Return True if one of some gaps goes on in the next step.

    Args:
        gaps: any.
        length: of the step.
    """
    return any(gap.back_before >= length for gap in gaps)


def slices(lower: Timestep, upper: Timestep, length: int) -> Iterator[slice]:
    """Yield where in a step the timesteps [lower, upper) lie, at most as many as the step has.

    Args:
        lower: the first one, of this step or the next.
        upper: after the last one; none lies between if it is not above ``lower``.
        length: of the step.
    """
    if lower < min(upper, length):
        yield slice(lower, min(upper, length))
    if max(lower, length) < upper:
        yield slice(max(lower - length, 0), upper - length)


def part_of(load: Loads, lower: Timestep, upper: Timestep) -> Loads:
    """Return the load of the timesteps [lower, upper), empty or in two steps at most."""
    parts = [load[span] for span in slices(lower, upper, len(load))]
    return parts[0] if len(parts) == 1 else np.concatenate([load[:0], *parts])


def remove(load: Loads, lower: Timestep, upper: Timestep, size_bytes: Bytes) -> None:
    """Take an array out of a load in the timesteps [lower, upper), empty or in two steps at most."""
    for span in slices(lower, upper, len(load)):
        load[span] -= size_bytes
