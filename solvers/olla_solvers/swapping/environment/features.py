"""What a player sees of each node: the six features of equation 1, and the edges' weights.

Sizes are relative to the mean of all actions' arrays, and times to the mean time of copying one of these out
and in (or of making one again, without copies), as logarithms where they range over a whole step: so a
small step and a large one look alike, and who has learned from one can play the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.swapping.environment.actions import Action
from olla_solvers.swapping.environment.operations import Operation
from olla_solvers.swapping.transfers import Link

FEATURES = 6
"""Size; seconds of copying, of making again, and until the next access; what the node stands for; whether
that may be done: 1 if so, -1 if it has been done, 0 otherwise."""

VALID = 5
"""The feature that changes as the game goes on."""

Features = np.ndarray[Any, np.dtype[np.float32]]
"""A row for each node."""


def time_unit(actions: Sequence[Action]) -> Seconds:
    """Return the seconds that count as 1: of copying what an action stands for, or of making it again."""
    copies = [action.copy_seconds for action in actions if not action.is_removal]
    removals = [action.again_seconds for action in actions if action.is_removal]
    seconds = [taken for taken in copies or removals if taken > 0]
    return sum(seconds) / len(seconds) if seconds else 1.0


def node_features(
    operations: Sequence[Operation], actions: Sequence[Action], sizes: Sequence[Bytes], link: Link
) -> Features:
    """Return the features of all nodes at the beginning of the step.

    Args:
        operations: the nodes.
        actions: what they stand for.
        sizes: of all arrays.
        link: which copies.
    """
    unit = time_unit(actions)
    mean_bytes = sum(action.size_bytes for action in actions) / max(1, len(actions)) or 1.0
    again: dict[ArrayIndex, Seconds] = {
        array: action.again_seconds for action in actions if action.is_removal for array in action.arrays
    }
    rows = np.zeros((len(operations), FEATURES), dtype=np.float32)
    next_use: dict[ArrayIndex, Seconds] = {}
    for node in range(len(operations) - 1, 0, -1):
        operation = operations[node]
        size = sizes[operation.array]
        soon = next_use.get(operation.array, operation.begin_seconds) - operation.begin_seconds
        copying = link.out_seconds(size) + link.in_seconds(size)
        rows[node, :4] = (
            size / mean_bytes,
            copying / unit,
            again.get(operation.array, 0.0) / unit,
            np.log1p(soon / unit),
        )
        next_use[operation.array] = operation.begin_seconds
    for action in actions:
        rows[action.node, 4] = -1.0 if action.is_removal else 1.0
    return rows


def edge_weights(
    edges: Mapping[tuple[int, int], Seconds], actions: Sequence[Action]
) -> dict[tuple[int, int], float]:
    """Return the weights of edges in logarithms of the unit of time.

    Args:
        edges: with their seconds.
        actions: of the step.
    """
    unit = time_unit(actions)
    return {pair: float(np.log1p(seconds / unit)) for pair, seconds in edges.items()}
