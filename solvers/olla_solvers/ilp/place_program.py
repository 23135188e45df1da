"""States the mixed integer program of placement: OLLA equation 15, that is equations 6-8.

The same program as (1)-(6) of "Profile-guided memory optimization for deep neural networks", §3.1. Each span
has an address A[i]. Two spans alive together must lie one below the other; equation 6's two binaries are
1 - z and z of one column here, since exactly one of them is 1 for such a pair. Pairs whose lifetimes do not
overlap have no rows: with the order given, lifetimes are exact, which covers those that precedence keeps
apart (OLLA §4.2). Nor have pairs that are both given, and if a given span leaves no room below, z is
settled.

M in equations 7a and 7b is the height of a known placement, which no useful solution exceeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from olla_solvers.ilp.model import Column, Expression, LinearModel
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset
from olla_solvers.spans import height_bytes, unit_bytes

Pair: TypeAlias = tuple[int, int]

Address: TypeAlias = tuple[Column, float]
"""A column, and the units that one of it stands for."""


@dataclass(frozen=True)
class PlaceProgram:
    """The program and what is needed to read its solutions.

    Attributes:
        model: the linear program; its objective is the height in units.
        unit_bytes: bytes of one unit.
        addresses: A, for each span.
    """

    model: LinearModel
    unit_bytes: Bytes
    addresses: tuple[Address, ...]

    def decode(self, spans: Sequence[Span], values: Sequence[float]) -> tuple[Offset, ...]:
        """Return exact offsets: spans by the solver's addresses, each as low as those before it allow.

        The solver's own addresses are floating point; which span lies below which is what it decided.
        """
        neighbours: list[list[int]] = [[] for _ in spans]
        for first, second in overlapping_pairs(spans):
            neighbours[first].append(second)
            neighbours[second].append(first)
        offsets: dict[int, Offset] = {}
        for index in sorted(
            range(len(spans)), key=lambda i: values[self.addresses[i][0]] * self.addresses[i][1]
        ):
            span = spans[index]
            tops = (offsets[low] + spans[low].size_bytes for low in neighbours[index] if low in offsets)
            floor = -(-max(tops, default=0) // span.alignment) * span.alignment
            offsets[index] = floor if span.offset is None else span.offset
        return tuple(offsets[index] for index in range(len(spans)))


def is_free_of_collisions(spans: Sequence[Span], offsets: Sequence[Offset]) -> bool:
    """Return True if no two spans alive together share a byte."""
    return all(
        offsets[first] + spans[first].size_bytes <= offsets[second]
        or offsets[second] + spans[second].size_bytes <= offsets[first]
        for first, second in overlapping_pairs(spans)
    )


def overlapping_pairs(spans: Sequence[Span]) -> list[Pair]:
    """Return the pairs of spans with bytes that are alive together, each once: possible collisions."""
    by_birth = sorted(
        (i for i, span in enumerate(spans) if span.size_bytes > 0), key=lambda i: spans[i].lower
    )
    pairs: list[Pair] = []
    alive: list[int] = []
    for index in by_birth:
        alive = [other for other in alive if spans[other].upper > spans[index].lower]
        pairs.extend((other, index) for other in alive)
        alive.append(index)
    return pairs


def place_program(spans: Sequence[Span], known: Sequence[Offset], bound: Bytes) -> PlaceProgram:
    """State the program.

    Args:
        spans: rectangles.
        known: a placement: the warm start, and the height that no useful solution exceeds.
        bound: the most bytes alive at once, below which the height cannot fall.

    Returns:
        The program, with its start set.
    """
    unit = unit_bytes(spans)
    height = height_bytes(spans, known)
    model = LinearModel()
    model.objective = model.column(bound // unit, height // unit)
    model.start[model.objective] = height // unit
    addresses = tuple(_address(model, span, known[i], height, unit) for i, span in enumerate(spans))
    for span, address in zip(spans, addresses, strict=True):
        _below_the_top(model, span, address, unit)
    for pair in overlapping_pairs(spans):
        _one_below_the_other(model, spans, addresses, pair, known, height // unit, unit)
    return PlaceProgram(model, unit, addresses)


def _address(model: LinearModel, span: Span, known: Offset, height: Bytes, unit: Bytes) -> Address:
    """Add a span's address; in whole alignments if the unit does not imply its alignment."""
    step = unit if unit % span.alignment == 0 else span.alignment
    low = 0 if span.offset is None else span.offset
    high = max(0, height - span.size_bytes) if span.offset is None else span.offset
    column = model.column(low / step, high / step, integer=step != unit)
    model.start[column] = known / step
    return column, step / unit


def _below_the_top(model: LinearModel, span: Span, address: Address, unit: Bytes) -> None:
    """Equation 8: every span ends at or below the height."""
    column, step = address
    end = Expression([(column, step), (model.objective, -1)], span.size_bytes / unit)
    model.require(end, "<=")


def _one_below_the_other(
    model: LinearModel,
    spans: Sequence[Span],
    addresses: Sequence[Address],
    pair: Pair,
    known: Sequence[Offset],
    most: int,
    unit: Bytes,
) -> None:
    """Equations 6, 7a and 7b for two spans alive together."""
    first, second = pair
    if spans[first].offset is not None and spans[second].offset is not None:
        return
    side = _only_side(spans[first], spans[second])
    column = model.column(side, side, integer=True) if side is not None else model.binary()
    model.start[column] = float(known[second] < known[first])
    for low, high, sign in ((first, second, 1), (second, first, -1)):
        free = most if sign > 0 else -most
        row = Expression([addresses[low], (column, -free)], spans[low].size_bytes / unit)
        row.add(addresses[high][0], -addresses[high][1])
        model.require(row, "<=", 0 if sign > 0 else most)


def _only_side(first: Span, second: Span) -> int | None:
    """Return the value of a pair's z that a given offset forces (0: the first lies below), or None."""
    if first.offset is not None and first.offset < second.size_bytes:
        return 0
    if second.offset is not None and second.offset < first.size_bytes:
        return 1
    return None
