"""Orders of trial for the search: a few known good ones side by side, and random ones on request.

Which array is tried first decides more than any pruning rule, and no one order is good for all instances. So
the search keeps the known good orders going side by side, each from where it was left. In between, random
orders begin anew, which serves small parts of an instance better than long runs. The budgets grow
geometrically, in nodes, so that a run can be repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.place.search.instance import Prepared
from olla_solvers.place.search.layout import Ints

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

FIRST_BUDGET = 2.0
"""Nodes for each array that a lasting order may have tried at the end of the first round."""

BUDGET_GROWTH = 2.0
"""Factor on the budget from round to round."""

LARGEST_NOISE = 0.1
"""Most noise on a random order's scores, in their standard deviations."""

LASTING_ORDERS = (
    ("events, area", 4),
    ("bytes beside, area", 2),
    ("area", 1),
    ("sections, area", 1),
    ("neighbours, area", 1),
)
"""The measures that arrays are sorted by, descending, and a factor on the budget from the second round on,
the largest for those that solve most alone."""

RANDOM_MEASURES = ("events", "bytes beside", "load", "sections", "neighbours")
"""The measures that a random order disturbs, one of them at a time."""


@dataclass(frozen=True)
class Attempt:
    """An order of trial and how long to try it.

    Attributes:
        thread: number of the search thread that goes on with it; None for a fresh start.
        rank: for each array its place in the order.
        nodes: placements that it may have tried, from its beginning, when it is left.
        name: for reports.
    """

    thread: int | None
    rank: Ints
    nodes: int
    name: str


def attempts(prepared: Prepared, random_orders: int = 0) -> Iterator[Attempt]:
    """Yield the attempts in turn, without end, always the same.

    Args:
        prepared: the instance.
        random_orders: number of random orders in a round.
    """
    measured = measures(prepared)
    random = np.random.default_rng(0)
    lasting = [
        (name, weight, _ranks([measured[key] for key in name.split(", ")])) for name, weight in LASTING_ORDERS
    ]
    for round_number in itertools.count():
        budget = FIRST_BUDGET * BUDGET_GROWTH**round_number * len(prepared.spans)
        for thread, (name, weight, rank) in enumerate(lasting):
            # An easy instance falls to one of the orders at once: in the first round each has its chance.
            factor = weight if round_number > 0 else 1
            yield Attempt(thread, rank, int(factor * budget), name)
        for _ in range(random_orders):
            measure = RANDOM_MEASURES[int(random.integers(len(RANDOM_MEASURES)))]
            score: Floats = np.log(measured[measure])
            noise = (
                LARGEST_NOISE
                * float(score.std())
                * random.standard_normal(int(prepared.twin_class.max()) + 1)
            )
            # Identical arrays score alike.
            rank = _ranks([score + noise[prepared.twin_class]])
            yield Attempt(None, rank, int(budget), f"random {measure}")


def measures(prepared: Prepared) -> dict[str, Ints]:
    """Return for each array how much of the time and of the bytes it is in the way of.

    Lengths of time are no such measure: between two births or deaths time can be stretched at will. So
    lifetimes are counted in births and deaths (events), in sections, in neighbours and in their bytes.
    """
    first, last, size = prepared.instance.first, prepared.instance.last, prepared.instance.size
    events = np.sort(np.concatenate([prepared.lower, prepared.upper]))
    before_end = np.searchsorted(events, prepared.upper)
    return {
        "events": before_end - np.searchsorted(events, prepared.lower, "right") + 2,
        "bytes beside": _alive_with(prepared, size),
        "area": (last - first) * size,
        "size": size,
        "load": _load(prepared),
        "sections": last - first,
        "neighbours": _alive_with(prepared, np.ones_like(size)),
    }


def _load(prepared: Prepared) -> Ints:
    """Return for each array the live bytes, summed over its sections."""
    first, last, size = prepared.instance.first, prepared.instance.last, prepared.instance.size
    change = np.zeros(prepared.sections + 1, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last, size)
    before = np.concatenate([[0], np.cumsum(np.cumsum(change))])
    load: Ints = before[last] - before[first]
    return load


def _alive_with(prepared: Prepared, amount: Ints) -> Ints:
    """Return for each array the sum of an amount over all that are alive with it, itself included."""
    born, died = (np.zeros(prepared.sections + 1, dtype=np.int64) for _ in range(2))
    np.add.at(born, prepared.instance.first + 1, amount)
    np.add.at(died, prepared.instance.last, amount)
    total: Ints = np.cumsum(born)[prepared.instance.last] - np.cumsum(died)[prepared.instance.first]
    return total


def _ranks(keys: list[Ints] | list[Floats]) -> Ints:
    """Return places by descending keys, the most important first, then by index."""
    order = np.lexsort([-key for key in reversed(keys)])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank
