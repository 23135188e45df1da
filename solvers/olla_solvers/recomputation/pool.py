"""Keeps the states that were found to be best at some budget."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.evaluate import Evaluation, States
from olla_solvers.recomputation.problem import Seconds


@dataclass(frozen=True, slots=True)
class Evaluated:
    """States, and what they cost."""

    states: States
    evaluation: Evaluation

    @property
    def peak_bytes(self) -> Bytes:
        """Most bytes alive at once."""
        return self.evaluation.peak_bytes

    @property
    def extra_seconds(self) -> Seconds:
        """Of all repetitions."""
        return self.evaluation.extra_seconds


class Pool:
    """States of which none has both a lower peak and fewer seconds than another."""

    def __init__(self) -> None:
        """Start without any."""
        self._kept: list[Evaluated] = []

    def __iter__(self) -> Iterator[Evaluated]:
        """Go through them, from the lowest peak, which takes most time, to the fastest."""
        return iter(self._kept)

    def add(self, evaluated: Evaluated) -> bool:
        """Add states if they are valid and no others are as good; return True if so."""
        if not evaluated.evaluation.is_valid:
            return False
        at = bisect_right(self._kept, evaluated.peak_bytes, key=lambda evaluated: evaluated.peak_bytes)
        if at and self._kept[at - 1].extra_seconds <= evaluated.extra_seconds:
            return False
        first = bisect_left(self._kept, evaluated.peak_bytes, key=lambda evaluated: evaluated.peak_bytes)
        last = first
        while last < len(self._kept) and self._kept[last].extra_seconds >= evaluated.extra_seconds:
            last += 1
        self._kept[first:last] = [evaluated]
        return True

    def fastest(self, budget_bytes: Bytes) -> Evaluated | None:
        """Return the fastest states within a budget; None if there are none."""
        at = bisect_right(self._kept, budget_bytes, key=lambda evaluated: evaluated.peak_bytes)
        return self._kept[at - 1] if at else None

    def beyond(self, budget_bytes: Bytes, count: int) -> list[Evaluated]:
        """Return some states with the lowest peaks beyond a budget."""
        at = bisect_right(self._kept, budget_bytes, key=lambda evaluated: evaluated.peak_bytes)
        return self._kept[at : at + count]

    def lowest_within(self, most_seconds: Seconds) -> Evaluated:
        """Return the states with the lowest peak within so many seconds, or the fastest if none is."""
        within = (evaluated for evaluated in self._kept if evaluated.extra_seconds <= most_seconds)
        return next(within, self._kept[-1])

    @property
    def lowest(self) -> Evaluated:
        """The states with the lowest peak."""
        return self._kept[0]
