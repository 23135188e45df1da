"""A placement on its way: offsets, the height they need, and what found them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.place.skyline import height_bytes
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset


@dataclass(frozen=True, slots=True)
class Found:
    """A placement of some spans.

    Attributes:
        offsets: one for each span.
        height_bytes: end of the topmost span.
        method: what found it.
    """

    offsets: tuple[Offset, ...]
    height_bytes: Bytes
    method: str

    @classmethod
    def of(cls, spans: Sequence[Span], offsets: Sequence[Offset], method: str) -> Found:
        """Measure the height of offsets."""
        return cls(tuple(offsets), height_bytes(spans, offsets), method)


def lower_of(one: Found | None, other: Found | None) -> Found | None:
    """The placement with the smaller height; the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.height_bytes < one.height_bytes else one
