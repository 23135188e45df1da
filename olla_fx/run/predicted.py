"""Predicts what operators request of the allocator at sizes that never ran, from recordings at others.

An operator's requests keep their number and their order. The bytes of each mostly grow as some number of the
graph does (a tensor's bytes, an extent), up to a constant, else as a polynomial of the sizes: so the simplest
formula that meets all recordings is taken. A prediction never falls below what was recorded at smaller sizes,
nor exceeds what was recorded at larger ones. One that is too large is harmless; one that is too small is
served outside of the buffer, is counted, and leads to another recording.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from olla_fx.alignment import rounded
from olla_fx.run.recording import OperatorRecord, StepRecord, WorkspaceSlot

Sizes: TypeAlias = tuple[int, ...]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

TOLERANCE_BYTES = 128
"""Kernels round their requests up, so that a formula is met but for so much."""

SLOT_ALIGNMENT_BYTES = 512
"""Of the scratch requests within an operator's workspace."""

_Series: TypeAlias = tuple[tuple[Sizes, ...], tuple[int, ...]]
"""Recorded sizes, and the bytes of a request at each."""

MOST_MULTIPLIED = 3
"""Sizes whose products are looked at; of more there are too many."""

RECORDS_NEEDED = 4
"""Recordings that are enough, however many sizes there are."""

MOST_RECORDS = 16
"""The last recordings that are looked at."""


@dataclass(frozen=True)
class _Formula:
    """A sum of features times numbers.

    Attributes:
        features: their indices.
        factors: one for each.
        slack_bytes: to be added: how far it missed a recording.
    """

    features: tuple[int, ...]
    factors: tuple[float, ...]
    slack_bytes: int

    def at(self, features: Floats) -> int:
        """Return the bytes for the features of some sizes."""
        pairs = zip(self.features, self.factors, strict=True)
        total = sum(float(features[index]) * factor for index, factor in pairs)
        return math.ceil(total - 1e-6) + self.slack_bytes


@dataclass(frozen=True, slots=True)
class _Slot:
    """A scratch request: its ordinal, its series, and the positions of the slots that lie below it."""

    ordinal: int
    series: int
    below: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests of an operator, whatever the sizes; bytes are given by the index of a series.

    Attributes:
        arrays: ordinal, array index, and what is requested beyond the tensor's bytes, if anything.
        slots: its scratch requests, by offset.
        persistent: ordinal and bytes of blocks that outlive it.
    """

    arrays: tuple[tuple[int, int, int | None], ...]
    slots: tuple[_Slot, ...]
    persistent: tuple[tuple[int, int], ...]

    def at(self, storage_bytes: Sequence[int], predicted: Sequence[int]) -> OperatorRecord:
        """Return what is requested at some sizes.

        Args:
            storage_bytes: of each array.
            predicted: the bytes of each series.
        """
        arrays = tuple(
            [
                (ordinal, storage_bytes[array] + (0 if beyond is None else predicted[beyond]), array)
                for ordinal, array, beyond in self.arrays
            ]
        )
        if not self.slots and not self.persistent:
            return OperatorRecord(arrays, (), 0, (), ())
        placed: list[WorkspaceSlot] = []
        ends: list[int] = []
        for slot in self.slots:
            # Above all that lay below it, which may be alive with it.
            offset = max([ends[position] for position in slot.below], default=0)
            size_bytes = predicted[slot.series]
            placed.append(WorkspaceSlot(slot.ordinal, size_bytes, offset))
            ends.append(offset + rounded(size_bytes, SLOT_ALIGNMENT_BYTES))
        persistent = tuple([(ordinal, predicted[series]) for ordinal, series in self.persistent])
        return OperatorRecord(arrays, tuple(placed), max(ends, default=0), persistent, ())


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The requests of a step, whatever the sizes, and the series that give their bytes."""

    operators: Mapping[str, _Requests]
    series: tuple[_Series, ...]


class Recordings:
    """What was recorded of the steps of one family, by their sizes."""

    def __init__(self, numbers: Callable[[Sizes], Sequence[Any]]) -> None:
        """Start without recordings.

        Args:
            numbers: gives the numbers of the graph at some sizes.
        """
        self._numbers = numbers
        self._records: dict[Sizes, StepRecord] = {}
        self._features: dict[Sizes, Floats] = {}
        self._patterns: dict[Sizes, _Pattern] = {}
        self._formulas: dict[_Series, _Formula | None] = {}

    def add(self, sizes: Sizes, record: StepRecord) -> None:
        """Note a recorded run."""
        self._records.pop(sizes, None)
        self._records[sizes] = record
        self._features[sizes] = self._features_at(sizes)
        self._formulas.clear()
        self._patterns.clear()
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
        if len(self._records) < min(2 + len(sizes), RECORDS_NEEDED):
            return None
        nearest = max(self._records, key=lambda at: (_nearness(at, sizes), at))
        if nearest not in self._patterns:
            self._patterns[nearest] = self._pattern_of(self._records[nearest])
        pattern = self._patterns[nearest]
        features = self._features_at(sizes)
        predicted = [self._predict(known, recorded, sizes, features) for known, recorded in pattern.series]
        operators = {
            name: requests.at(storage_bytes, predicted) for name, requests in pattern.operators.items()
        }
        return StepRecord(operators, (), is_predicted=True)

    def _pattern_of(self, nearest: StepRecord) -> _Pattern:
        """Return what the recordings say of a step that requests as a recorded one does."""
        series_index: dict[_Series, int] = {}
        operators: dict[str, _Requests] = {}
        for name, record in nearest.operators.items():
            arrays = tuple((ordinal, array, None) for ordinal, _, array in record.arrays)
            if record.is_as_planned:
                operators[name] = _Requests(arrays, (), ())
            else:
                operators[name] = self._requests_of(name, record, series_index)
        return _Pattern(operators, tuple(series_index))

    def _requests_of(self, name: str, nearest: OperatorRecord, series_index: dict[_Series, int]) -> _Requests:
        """Return an operator's requests, from the sizes at which it requested as often as at the nearest."""
        structure = nearest.structure
        records = {at: record.operators[name] for at, record in self._records.items()}
        known = tuple(at for at, record in records.items() if record.structure == structure)
        alike = [records[at] for at in known]

        def series(recorded: Iterable[int]) -> int:
            return series_index.setdefault((known, tuple(recorded)), len(series_index))

        arrays: list[tuple[int, int, int | None]] = []
        for position, (ordinal, _, array) in enumerate(nearest.arrays):
            beyond = [max(0, record.arrays[position][1] - record.storage_bytes[position]) for record in alike]
            arrays.append((ordinal, array, series(beyond) if any(beyond) else None))
        slots: list[_Slot] = []
        lower: list[WorkspaceSlot] = []
        for position in sorted(range(len(nearest.workspace)), key=lambda i: nearest.workspace[i].offset):
            slot = nearest.workspace[position]
            below = tuple(
                index for index, other in enumerate(lower) if other.offset + other.size_bytes <= slot.offset
            )
            recorded = series(record.workspace[position].size_bytes for record in alike)
            slots.append(_Slot(slot.ordinal, recorded, below))
            lower.append(slot)
        persistent = tuple(
            (ordinal, series(record.persistent[position][1] for record in alike))
            for position, (ordinal, _) in enumerate(nearest.persistent)
        )
        return _Requests(tuple(arrays), tuple(slots), persistent)

    def _predict(
        self, known: tuple[Sizes, ...], recorded: tuple[int, ...], sizes: Sizes, features: Floats
    ) -> int:
        """Return the bytes of a request from those at the recorded sizes."""
        if len(set(recorded)) == 1:
            return recorded[0]
        key = known, recorded
        if key not in self._formulas:
            rows = np.stack([self._features[at] for at in known])
            self._formulas[key] = _simplest(rows, np.array(recorded, dtype=np.float64), len(sizes))
        formula = self._formulas[key]
        pairs = list(zip(known, recorded, strict=True))
        if formula is None:
            # Nothing is taken to grow faster than the sizes together.
            predicted = max(math.ceil(size * _growth(at, sizes)) for at, size in pairs)
        else:
            predicted = formula.at(features)
        least = max((size for at, size in pairs if _covers(sizes, at)), default=1)
        most = min((size for at, size in pairs if _covers(at, sizes)), default=None)
        return max(least, predicted if most is None else min(predicted, most))

    def _features_at(self, sizes: Sizes) -> Floats:
        """Return what requests may grow with: monomials of the sizes first, then the numbers of the graph."""
        monomials = [
            math.prod(size**exponent for size, exponent in zip(sizes, exponents, strict=True))
            for exponents in _monomials(len(sizes))
        ]
        return np.array([*monomials, *map(float, self._numbers(sizes))], dtype=np.float64)


def _simplest(rows: Floats, recorded: Floats, symbols: int) -> _Formula | None:
    """Return the simplest formula of the features that meets what was recorded; None if none does.

    Args:
        rows: the features at each recorded size.
        recorded: the bytes there.
        symbols: the number of sizes.
    """
    for candidates in _candidates(rows, symbols):
        best: _Formula | None = None
        for features in candidates:
            if len(features) > len(recorded):
                continue
            columns = rows[:, features]
            scale = np.abs(columns).max(axis=0)
            if not scale.all():
                continue
            factors, *_ = np.linalg.lstsq(columns / scale, recorded, rcond=None)
            missed = math.ceil(float(np.abs(columns / scale @ factors - recorded).max()) - 1e-3)
            if missed <= TOLERANCE_BYTES and (best is None or missed < best.slack_bytes):
                best = _Formula(features, tuple((factors / scale).tolist()), missed)
        if best is not None:
            return best
    return None


def _candidates(rows: Floats, symbols: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield sets of features, simpler ones first: one, with a constant, polynomials of one size, of all."""
    varying = [index for index in range(rows.shape[1]) if len(set(rows[:, index].tolist())) > 1]
    _, distinct = np.unique(rows[:, varying], axis=1, return_index=True)
    single = [varying[position] for position in sorted(distinct.tolist())]
    yield [(index,) for index in single]
    yield [(0, index) for index in single]
    exponents = _monomials(symbols)
    position = {exponent: index for index, exponent in enumerate(exponents)}
    units = [tuple(int(at == symbol) for at in range(symbols)) for symbol in range(symbols)]
    yield [(0, position[unit], position[tuple(2 * e for e in unit)]) for unit in units]
    if symbols > 1:
        mixed = [index for index, exponent in enumerate(exponents) if max(exponent) < 2]
        yield [tuple(mixed)]
        yield [(index, other) for index, other in itertools.combinations(mixed, 2)]


def _covers(one: Sizes, other: Sizes) -> bool:
    """Return True if no size of the first is smaller."""
    return all(left >= right for left, right in zip(one, other, strict=True))


def _nearness(at: Sizes, sizes: Sizes) -> float:
    return -sum(abs(math.log(old / new)) for old, new in zip(at, sizes, strict=True))


def _growth(at: Sizes, sizes: Sizes) -> float:
    return math.prod(max(1.0, new / old) for old, new in zip(at, sizes, strict=True))


def _monomials(count: int) -> list[tuple[int, ...]]:
    """Return exponents of monomials: the constant, every product of different sizes, and the squares."""
    if count <= MOST_MULTIPLIED:
        products = sorted(itertools.product((0, 1), repeat=count), key=sum)
    else:
        products = [(0,) * count, *(tuple(int(at == size) for at in range(count)) for size in range(count))]
    squares = [tuple(2 * int(at == size) for at in range(count)) for size in range(count)]
    return [*products, *squares]


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
