"""Keeps the states that were found to be best at some budget."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from olla_solvers.problem import Bytes
from olla_solvers.recomputation.evaluate import Evaluation, States
from olla_solvers.recomputation.problem import Seconds


@dataclass(frozen=True, slots=True)
class Found:
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
        self._found: list[Found] = []

    def __iter__(self) -> Iterator[Found]:
        """Go through them, from the lowest peak, which takes most time, to the fastest."""
        return iter(self._found)

    def add(self, found: Found) -> bool:
        """Add states if they are valid and no others are as good; return True if so."""
        if not found.evaluation.is_valid:
            return False
        at = bisect_right(self._found, found.peak_bytes, key=lambda each: each.peak_bytes)
        if at and self._found[at - 1].extra_seconds <= found.extra_seconds:
            return False
        first = bisect_left(self._found, found.peak_bytes, key=lambda each: each.peak_bytes)
        last = first
        while last < len(self._found) and self._found[last].extra_seconds >= found.extra_seconds:
            last += 1
        self._found[first:last] = [found]
        return True

    def fastest(self, budget_bytes: Bytes) -> Found | None:
        """Return the fastest states within a budget; None if there are none."""
        at = bisect_right(self._found, budget_bytes, key=lambda each: each.peak_bytes)
        return self._found[at - 1] if at else None

    def beyond(self, budget_bytes: Bytes, count: int) -> list[Found]:
        """Return some states with the lowest peaks beyond a budget."""
        at = bisect_right(self._found, budget_bytes, key=lambda each: each.peak_bytes)
        return self._found[at : at + count]

    def lowest_within(self, most_seconds: Seconds) -> Found:
        """Return the states with the lowest peak within so many seconds, or the fastest if none is."""
        within = (found for found in self._found if found.extra_seconds <= most_seconds)
        return next(within, self._found[-1])

    @property
    def lowest(self) -> Found:
        """The states with the lowest peak."""
        return self._found[0]
