"""Predicts what operators request of the allocator at sizes that never ran, from recordings at others.

An operator's requests keep their number and their order; the bytes of each grow as a polynomial of the sizes.
So a few recorded sizes determine it. A prediction never falls below what was recorded at smaller sizes, nor
exceeds what was recorded at larger ones. One that is too large is harmless; one that is too small is served
outside of the buffer, is counted, and leads to another recording.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from olla_fx.alignment import rounded
from olla_fx.run.recording import OperatorRecord, StepRecord, WorkspaceSlot

Sizes: TypeAlias = tuple[int, ...]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

SLACK_BYTES = 128
"""Kernels round their requests up, so that a polynomial is met but for so much."""

MOST_RECORDS = 16
"""The last recordings that are looked at."""


@dataclass(frozen=True)
class _Weights:
    """How much each recording counts for the sizes to predict.

    Attributes:
        known: the recorded sizes.
        sizes: those to predict.
        weights: of the polynomial through the recordings.
    """

    known: Sequence[Sizes]
    sizes: Sizes
    weights: Floats

    def predict(self, recorded: Sequence[int]) -> int:
        """Return the bytes of a request from those at the recorded sizes."""
        if len(set(recorded)) == 1 and len(recorded) > 1:
            return recorded[0]
        fit = math.ceil(float(np.dot(self.weights, recorded))) + SLACK_BYTES
        pairs = list(zip(self.known, recorded, strict=True))
        least = max((size for at, size in pairs if _covers(self.sizes, at)), default=1)
        most = min((size for at, size in pairs if _covers(at, self.sizes)), default=None)
        if most is None:
            # Beyond all recordings, nothing grows faster than the square of the sizes.
            most = max(math.ceil(size * self._growth(at) ** 2) for at, size in pairs)
        return max(least, min(fit, most))

    def _growth(self, at: Sizes) -> float:
        return math.prod(max(1.0, size / old) for size, old in zip(self.sizes, at, strict=True))


class Recordings:
    """What was recorded of the steps of one family, by their sizes."""

    def __init__(self) -> None:
        """Start without recordings."""
        self._records: dict[Sizes, StepRecord] = {}

    def add(self, sizes: Sizes, record: StepRecord) -> None:
        """Note a recorded run."""
        self._records.pop(sizes, None)
        self._records[sizes] = record
        while len(self._records) > MOST_RECORDS:
            del self._records[next(iter(self._records))]

    def at(self, sizes: Sizes, storage_bytes: Sequence[int]) -> StepRecord | None:
        """Return what a run at some sizes will request.

        Args:
            sizes: of the run.
            storage_bytes: of each array at these sizes.

        Returns:
            None while too little was recorded.
        """
        if sizes in self._records:
            return self._records[sizes]
        known = list(self._records)
        if len(known) < 2 + len(sizes):
            return None
        weights = _Weights(known, sizes, _weights(known, sizes))
        nearest = max(known, key=lambda at: (_nearness(at, sizes), at))
        operators = {
            name: self._predicted(name, record, weights, storage_bytes)
            for name, record in self._records[nearest].operators.items()
        }
        return StepRecord(operators, (), is_predicted=True)

    def _predicted(
        self, name: str, nearest: OperatorRecord, weights: _Weights, storage_bytes: Sequence[int]
    ) -> OperatorRecord:
        """Return one operator's requests."""
        if not nearest.workspace and not nearest.persistent and not nearest.arrays:
            return nearest
        alike, indices = [], []
        for index, at in enumerate(weights.known):
            record = self._records[at].operators[name]
            if _structure(record) == _structure(nearest):
                alike.append(record)
                indices.append(index)
        if len(indices) < len(weights.known):
            known = [weights.known[index] for index in indices]
            weights = _Weights(known, weights.sizes, _weights(known, weights.sizes))
        arrays = []
        for position, (ordinal, _, array) in enumerate(nearest.arrays):
            beyond = [
                record.arrays[position][1] - record.storage_bytes[position]
                for record in alike
                if record.storage_bytes
            ]
            extra = weights.predict([max(0, size) for size in beyond]) if any(beyond) else 0
            arrays.append((ordinal, storage_bytes[array] + extra, array))
        slots = [
            replace(
                slot, size_bytes=weights.predict([record.workspace[position].size_bytes for record in alike])
            )
            for position, slot in enumerate(nearest.workspace)
        ]
        persistent = tuple(
            (ordinal, weights.predict([record.persistent[position][1] for record in alike]))
            for position, (ordinal, _) in enumerate(nearest.persistent)
        )
        placed, height = _stacked(nearest.workspace, slots)
        return OperatorRecord(tuple(arrays), placed, height, persistent, ())


def _structure(record: OperatorRecord) -> tuple[Any, ...]:
    """Return what must be equal for two recordings of an operator to be comparable."""
    return (
        tuple((ordinal, array) for ordinal, _, array in record.arrays),
        tuple(slot.ordinal for slot in record.workspace),
        tuple(ordinal for ordinal, _ in record.persistent),
    )


def _stacked(
    old: Sequence[WorkspaceSlot], slots: Sequence[WorkspaceSlot], alignment_bytes: int = 512
) -> tuple[tuple[WorkspaceSlot, ...], int]:
    """Place slots of other sizes, each above all that lay below it, which may be alive with it."""
    if len(slots) < 2:
        heights = [rounded(slot.size_bytes, alignment_bytes) for slot in slots]
        return tuple(replace(slot, offset=0) for slot in slots), sum(heights)
    ends: dict[int, int] = {}
    placed: dict[int, WorkspaceSlot] = {}
    for index in sorted(range(len(slots)), key=lambda position: old[position].offset):
        below = (
            ends[other] for other in ends if old[other].offset + old[other].size_bytes <= old[index].offset
        )
        offset = max(below, default=0)
        placed[index] = replace(slots[index], offset=offset)
        ends[index] = offset + rounded(slots[index].size_bytes, alignment_bytes)
    return tuple(placed[index] for index in range(len(slots))), max(ends.values())


def _covers(one: Sizes, other: Sizes) -> bool:
    """Return True if no size of the first is smaller."""
    return all(left >= right for left, right in zip(one, other, strict=True))


def _nearness(at: Sizes, sizes: Sizes) -> float:
    return -sum(abs(math.log(old / new)) for old, new in zip(at, sizes, strict=True))


def _weights(known: Sequence[Sizes], sizes: Sizes) -> Floats:
    """Return weights by which values at known sizes add up to that of their polynomial at others."""
    monomials = _monomials(len(sizes))
    scale = np.array(sizes, dtype=np.float64)
    rows = np.array(known, dtype=np.float64) / scale
    columns: list[Floats] = []
    for exponents in monomials:
        column = np.prod(rows ** np.array(exponents), axis=1)
        candidate = np.stack([*columns, column], axis=1)
        if np.linalg.matrix_rank(candidate, tol=1e-6) == candidate.shape[1]:
            columns.append(column)
        if len(columns) == len(known):
            break
    # Scaled by the sizes to predict, at which every monomial is 1.
    weights: Floats = np.ones(len(columns)) @ np.linalg.pinv(np.stack(columns, axis=1))
    return weights


def _monomials(count: int) -> list[tuple[int, ...]]:
    """Return exponents of monomials: constant, linear, mixed, and with one square."""
    linear = list(itertools.product((0, 1), repeat=count))
    squares = [
        tuple(2 if index == position else exponent for index, exponent in enumerate(exponents))
        for exponents in linear
        for position in range(count)
        if exponents[position] == 1
    ]
    return sorted(linear, key=sum) + sorted(set(squares), key=sum)


def requirements(record: StepRecord, names: Sequence[str]) -> tuple[list[int], Mapping[int, int]]:
    """Return the bytes of each operator's workspace, and of the arrays that were requested.

    Args:
        record: recorded or predicted.
        names: of the operators.
    """
    arrays = {
        array: size_bytes
        for operator in record.operators.values()
        for _, size_bytes, array in operator.arrays
    }
    return [record.operators[name].workspace_bytes for name in names], arrays
