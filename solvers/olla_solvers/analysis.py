"""The cost of an order: the resident sets and lifetimes of OLLA §2.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.problem import Array, Bytes, OperatorIndex, Problem, Timestep


@dataclass(frozen=True, slots=True)
class Range:
    """Timesteps ``[lower, upper)``; empty if ``upper <= lower``."""

    lower: Timestep
    upper: Timestep

    def __contains__(self, timestep: Timestep) -> bool:
        """Return True if the timestep lies in the range."""
        return self.lower <= timestep < self.upper


def lifetimes(problem: Problem, order: Sequence[OperatorIndex]) -> dict[str, Range]:
    """Return when each planned array is alive.

    Args:
        problem: the graph.
        order: operator indices, first to last.

    Returns:
        Array name to ``[producer's timestep, last consumer's timestep + 1)``; an unread array lives for
        its producer's timestep alone.
    """
    timestep = timesteps(order)
    return {array.name: _lifetime(array, timestep) for array in problem.planned}


def host_lifetimes(problem: Problem, order: Sequence[OperatorIndex]) -> dict[str, Range]:
    """Return when each array on the host is alive, as :func:`lifetimes` does of planned ones."""
    timestep = timesteps(order)
    return {array.name: _lifetime(array, timestep) for array in problem.on_host}


def resident_bytes(problem: Problem, order: Sequence[OperatorIndex]) -> tuple[Bytes, ...]:
    """Return the size of the resident set at every timestep: planned arrays alive, and the workspace.

    Args:
        problem: the graph.
        order: operator indices, first to last.

    Returns:
        Bytes for each timestep.
    """
    timestep = timesteps(order)
    change = [0] * (len(order) + 1)
    for array in problem.planned:
        lifetime = _lifetime(array, timestep)
        change[lifetime.lower] += array.size_bytes
        change[lifetime.upper] -= array.size_bytes
    resident: list[Bytes] = []
    alive = 0
    for operator, difference in zip(order, change, strict=False):
        alive += difference
        resident.append(alive + problem.operators[operator].workspace_bytes)
    return tuple(resident)


def peak_bytes(problem: Problem, order: Sequence[OperatorIndex]) -> Bytes:
    """Return the largest resident set of an order, in bytes; 0 for an empty graph.

    Args:
        problem: the graph.
        order: operator indices, first to last.

    Returns:
        Bytes of planned arrays and workspaces; static and output arrays are not counted.
    """
    return max(resident_bytes(problem, order), default=0)


def timesteps(order: Sequence[OperatorIndex]) -> list[Timestep]:
    """Return the inverse of an order: for each operator, its timestep."""
    timestep = [0] * len(order)
    for position, operator in enumerate(order):
        timestep[operator] = position
    return timestep


def _lifetime(array: Array, timestep: Sequence[Timestep]) -> Range:
    if array.producer is None:
        raise ValueError(f"{array.kind} array {array.name!r} has no producer, so no lifetime of its own")
    first = timestep[array.producer]
    return Range(first, 1 + max((timestep[consumer] for consumer in array.consumers), default=first))
