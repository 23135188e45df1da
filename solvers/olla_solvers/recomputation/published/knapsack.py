"""Chooses items of greatest value within a weight: greedily, or by dynamic programming on rounded weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy

Knapsack: TypeAlias = Literal["dynamic", "greedy"]

STEPS = 10_000
"""Weights are rounded to the total of 1 divided by this."""


def chosen(values: Sequence[float], weights: Sequence[float], most: float, knapsack: Knapsack) -> list[int]:
    """Return items whose weights stay within a limit.

    Args:
        values: of the items.
        weights: of the items, as shares of a total of 1.
        most: weight of all chosen items.
        knapsack: ``dynamic`` for the greatest value (up to the rounding of weights), ``greedy`` for the
            items with most value per weight, as far as they fit.
    """
    return _greedy(values, weights, most) if knapsack == "greedy" else _dynamic(values, weights, most)


def _greedy(values: Sequence[float], weights: Sequence[float], most: float) -> list[int]:
    by_rate = sorted(
        range(len(values)),
        key=lambda item: -values[item] / weights[item] if weights[item] else float("-inf"),
    )
    taken, left = [], most
    for item in by_rate:
        if weights[item] <= left:
            taken.append(item)
            left -= weights[item]
    return sorted(taken)


def _dynamic(values: Sequence[float], weights: Sequence[float], most: float) -> list[int]:
    room = round(most * STEPS)
    rounded = [round(weight * STEPS) for weight in weights]
    best = numpy.zeros(room + 1)
    takes = numpy.zeros((len(values), room + 1), dtype=bool)
    for item, (value, weight) in enumerate(zip(values, rounded, strict=True)):
        if weight > room:
            continue
        with_item = best[: room + 1 - weight] + value
        takes[item, weight:] = with_item > best[weight:]
        best[weight:] = numpy.maximum(best[weight:], with_item)
    taken = []
    for item in reversed(range(len(values))):
        if takes[item, room]:
            taken.append(item)
            room -= rounded[item]
    return taken[::-1]
