"""Orders of trial for the search: a few known good ones, then random ones without end.

Which array is tried first decides more than any pruning rule, and no one order is good for all instances. So
the search keeps the known good orders going side by side, each from where it was left, and between their
turns tries random ones, which weigh lifetimes against sizes and heed what earlier attempts failed on. The
budgets grow geometrically, in nodes, so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.place.search.instance import Ints, Prepared

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

RANDOM_ORDERS = 8
"""Random orders in a round."""

FIRST_BUDGET = 4.0
"""Nodes for each array that a lasting order may have tried at the end of the first round."""

RANDOM_SHARE = 0.25
"""Nodes of a random order's only attempt, as a share of the lasting orders' budget."""

BUDGET_GROWTH = 2.0
"""Factor on the budget from round to round."""

LARGEST_NOISE = 0.5
"""Most noise on a random order's scores, in their standard deviations."""

LARGEST_BLAME = 2.0
"""Most weight of blame in a random order's scores, in their standard deviations."""

KEEP, BY_TOTAL = 0, 1
"""What to do with ranks at a split: keep them, or put arrays in the fullest section first."""


@dataclass(frozen=True)
class Attempt:
    """One order of trial and how long to try it.

    Attributes:
        lane: number of a lasting order, which goes on from where it was left; None for a fresh start.
        rank: for each array its place in the order.
        rerank: ``KEEP`` or ``BY_TOTAL``.
        nodes: placements that it may have tried, from its beginning, when it is left.
        name: for reports.
    """

    lane: int | None
    rank: Ints
    rerank: int
    nodes: int
    name: str


def attempts(prepared: Prepared, blame: Ints, section_blame: Ints, seed: int) -> Iterator[Attempt]:
    """The attempts in turn, without end, the same for the same seed.

    Args:
        prepared: the instance.
        blame: for each array how often attempts failed on it; looked at anew for each attempt.
        section_blame: for each section how often its arrays did not fit; likewise.
        seed: of the random orders.
    """
    features = _Features(prepared)
    random = np.random.default_rng(seed)
    lasting = [(name, _ranks(keys), rerank) for name, keys, rerank in features.lasting_orders()]
    budget = FIRST_BUDGET * len(prepared.size)
    while True:
        for lane, (name, rank, rerank) in enumerate(lasting):
            yield Attempt(lane, rank, rerank, int(budget), name)
        for _ in range(RANDOM_ORDERS):
            name, keys, rerank = features.random_order(random, blame, section_blame)
            yield Attempt(None, _ranks(keys), rerank, int(budget * RANDOM_SHARE), name)
        budget *= BUDGET_GROWTH


class _Features:
    """What orders are made of."""

    def __init__(self, prepared: Prepared) -> None:
        self._lifetime = prepared.upper - prepared.lower
        self._first, self._last = prepared.first, prepared.last
        self._sections = prepared.last - prepared.first
        self._size = prepared.size
        self._total = _fullest_section(prepared)
        self._class = prepared.twin_class

    def lasting_orders(self) -> tuple[tuple[str, list[Ints], int], ...]:
        """Orders without chance: name, descending keys, what to do at splits."""
        area = self._lifetime * self._size
        return (
            ("lifetime, area", [self._lifetime, area], BY_TOTAL),
            ("sections, area", [self._sections, area], BY_TOTAL),
            ("area in sections", [self._sections * self._size], BY_TOTAL),
            ("area, lifetime", [area, self._lifetime], BY_TOTAL),
            ("lifetime, area, total", [self._lifetime, area, self._total], KEEP),
        )

    def random_order(
        self, random: np.random.Generator, blame: Ints, section_blame: Ints
    ) -> tuple[str, list[Ints], int]:
        """An order by a random score; identical arrays score alike."""
        base = random.integers(4)
        score = np.log(self._lifetime if base % 2 == 0 else self._sections)
        if base >= 2:
            score = score + np.log(self._size)
        deviation = float(score.std())
        weight = random.uniform(0, LARGEST_BLAME) * deviation
        score = score + weight * self._standardised_blame(blame, section_blame)
        noise = random.uniform(0, LARGEST_NOISE) * float(score.std())
        classes = int(self._class.max()) + 1
        score = score + (noise * random.standard_normal(classes))[self._class]
        ties = random.random(classes)[self._class]
        return f"random {base}", [score, ties], int(random.integers(2))

    def _standardised_blame(self, blame: Ints, section_blame: Ints) -> Floats:
        """The logarithm of what attempts failed on, alike for identical arrays, with deviation 1."""
        before = np.concatenate([[0], np.cumsum(section_blame)])
        total = blame + before[self._last] - before[self._first]
        if not total.any():
            return np.zeros(len(total))
        most = np.zeros(int(self._class.max()) + 1)
        np.maximum.at(most, self._class, total)
        logarithm: Floats = np.log1p(most[self._class] / total.mean())
        logarithm /= max(float(logarithm.std()), 1e-9)
        return logarithm


def _ranks(keys: list[Ints]) -> Ints:
    """Places by descending keys, the most important first, then by index."""
    order = np.lexsort([-key for key in reversed(keys)])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _fullest_section(prepared: Prepared) -> Ints:
    """For each array the largest total of a section that it lives in."""
    change = np.zeros(prepared.sections + 1, dtype=np.int64)
    np.add.at(change, prepared.first, prepared.size)
    np.subtract.at(change, prepared.last, prepared.size)
    table = np.cumsum(change)[: prepared.sections]
    most = np.zeros(len(prepared.size), dtype=np.int64)
    length = prepared.last - prepared.first
    width = 1
    while len(table):
        here = (length >= width) & (length < 2 * width)
        left, right = prepared.first[here], prepared.last[here] - width
        most[here] = np.maximum(table[left], table[right])
        if len(table) <= width:
            break
        table = np.maximum(table[:-width], table[width:])
        width *= 2
    return most
