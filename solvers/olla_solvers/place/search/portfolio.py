"""Orders of trial for the search: a few known good ones, then random ones without end.

Which array is tried first decides more than any pruning rule, and no one order is good for all instances. So
the search keeps the known good orders going side by side, each from where it was left, and between their
turns tries random ones, which weigh lifetimes against sizes and heed what earlier attempts failed on. The
budgets grow geometrically, in nodes, so that a run can be repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.place.search.instance import Ints, Prepared

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

RANDOM_ORDERS = 4
"""Random orders in a round, where nothing else is asked for."""

FIRST_BUDGET = 2.0
"""Nodes for each array that a lasting order may have tried at the end of the first round."""

BUDGET_GROWTH = 2.0
"""Factor on the budget from round to round."""

FULL = 0.98
"""Share of the capacity from which on a section counts as full."""

LARGEST_NOISE = 0.1
"""Most noise on a random order's scores, in their standard deviations."""

SHARE_BY_SIZE = 0.3
"""Of the random orders, those that weigh sizes too."""

SHARE_BY_TOTAL = 0.75
"""Of the random orders, those that put the fullest section first at splits."""

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


@dataclass(frozen=True)
class Lasting:
    """An order without chance.

    Attributes:
        name: for reports.
        keys: of the arrays, descending, the most important first.
        rerank: ``KEEP`` or ``BY_TOTAL``.
        weight: factor on its budget from the second round on.
    """

    name: str
    keys: list[Ints]
    rerank: int
    weight: int = 1


def attempts(
    prepared: Prepared, blame: Ints, section_blame: Ints, seed: int, random_orders: int = RANDOM_ORDERS
) -> Iterator[Attempt]:
    """The attempts in turn, without end, the same for the same seed.

    Args:
        prepared: the instance.
        blame: for each array how often attempts failed on it; looked at anew for each attempt.
        section_blame: for each section how often its arrays did not fit; likewise.
        seed: of the random orders.
        random_orders: how many of these in a round.
    """
    features = _Features(prepared)
    random = np.random.default_rng(seed)
    lasting = [(order, _ranks(order.keys)) for order in features.lasting_orders()]
    for rounds in itertools.count():
        budget = FIRST_BUDGET * BUDGET_GROWTH**rounds * len(prepared.size)
        for lane, (order, rank) in enumerate(lasting):
            # An easy instance falls to one of the orders at once: in the first round each has its chance.
            weight = order.weight if rounds > 0 else 1
            yield Attempt(lane, rank, order.rerank, int(weight * budget), order.name)
        for _ in range(random_orders):
            name, keys, rerank = features.random_order(random, blame, section_blame)
            yield Attempt(None, _ranks(keys), rerank, int(budget), name)


class _Features:
    """What orders are made of: how much of the time and of the bytes an array is in the way of.

    Lengths of time are no such measure: between two births or deaths time can be stretched at will. So
    lifetimes are counted in births and deaths, in sections, in neighbours and in their bytes.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._first, self._last = prepared.first, prepared.last
        self._size = prepared.size
        self._class = prepared.twin_class
        self._sections = prepared.last - prepared.first
        self._area = self._sections * self._size
        total = np.cumsum(_changes(prepared, prepared.size))
        self._load = _sums(total, prepared.first, prepared.last)
        full = (total >= FULL * prepared.capacity).astype(np.int64)
        self._full = _sums(full, prepared.first, prepared.last)
        births = np.concatenate([[0], np.cumsum(np.bincount(prepared.first, minlength=prepared.sections))])
        deaths = np.concatenate([[0], np.cumsum(np.bincount(prepared.last, minlength=prepared.sections + 1))])
        self._neighbours = births[prepared.last] - deaths[prepared.first + 1]
        self._bytes_beside = _bytes_beside(prepared)
        events = np.sort(np.concatenate([prepared.lower, prepared.upper]))
        left, right = (
            np.searchsorted(events, prepared.upper),
            np.searchsorted(events, prepared.lower, "right"),
        )
        self._events = left - right + 2

    def lasting_orders(self) -> tuple[Lasting, ...]:
        """Orders without chance, those that solve most alone with the largest weight."""
        return (
            Lasting("events, area", [self._events, self._area], BY_TOTAL, 4),
            Lasting("bytes beside, area", [self._bytes_beside, self._area], BY_TOTAL, 2),
            Lasting("area", [self._area], BY_TOTAL),
            Lasting("size", [self._size, self._sections], BY_TOTAL),
            Lasting("load, area", [self._load, self._area], BY_TOTAL),
            Lasting("full sections, area", [self._full, self._area], KEEP),
            Lasting("sections, area", [self._sections, self._area], BY_TOTAL),
            Lasting("neighbours, area", [self._neighbours, self._area], BY_TOTAL),
        )

    def random_order(
        self, random: np.random.Generator, blame: Ints, section_blame: Ints
    ) -> tuple[str, list[Floats], int]:
        """An order by a random score; identical arrays score alike."""
        bases = (self._events, self._bytes_beside, self._load, self._sections, self._neighbours)
        base = int(random.integers(len(bases)))
        score = np.log(bases[base])
        if random.random() < SHARE_BY_SIZE:
            score = score + np.log(self._size)
        deviation = float(score.std())
        weight = random.uniform(0, LARGEST_BLAME) * deviation
        score = score + weight * self._standardised_blame(blame, section_blame)
        noise = random.uniform(0, LARGEST_NOISE) * float(score.std())
        classes = int(self._class.max()) + 1
        score = score + (noise * random.standard_normal(classes))[self._class]
        ties = random.random(classes)[self._class]
        return f"random {base}", [score, ties], int(random.random() < SHARE_BY_TOTAL)

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


def _ranks(keys: list[Ints] | list[Floats]) -> Ints:
    """Places by descending keys, the most important first, then by index."""
    order = np.lexsort([-key for key in reversed(keys)])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank


def _changes(prepared: Prepared, amount: Ints) -> Ints:
    """Changes of a sum over the arrays alive, from section to section."""
    change = np.zeros(prepared.sections + 1, dtype=np.int64)
    np.add.at(change, prepared.first, amount)
    np.subtract.at(change, prepared.last, amount)
    return change


def _sums(amount: Ints, first: Ints, last: Ints) -> Ints:
    """Sums of an amount over ranges."""
    before = np.concatenate([[0], np.cumsum(amount)])
    found: Ints = before[last] - before[first]
    return found


def _bytes_beside(prepared: Prepared) -> Ints:
    """For each array the units of all that are alive with it, its own among them."""
    born = np.zeros(prepared.sections, dtype=np.int64)
    np.add.at(born, prepared.first, prepared.size)
    died = np.zeros(prepared.sections + 1, dtype=np.int64)
    np.add.at(died, prepared.last, prepared.size)
    before_end = np.concatenate([[0], np.cumsum(born)])[prepared.last]
    found: Ints = before_end - np.cumsum(died)[prepared.first]
    return found
