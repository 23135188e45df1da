"""Hitting sets and smallest infeasible subsets against enumeration."""

from __future__ import annotations

import itertools
import random

from olla_solvers.infeasible import smallest
from olla_solvers.infeasible.smallest import FEWEST_WITH_GAPS, hitting_set, smallest_subset
from olla_solvers.plan import Span
from olla_solvers.spans import max_live_bytes
from tests.olla_solvers.place.checking import lowest_height, random_instance


def test_hitting_sets_are_as_small_as_enumeration_finds() -> None:
    draw = random.Random(1)
    for _ in range(200):
        sets = [frozenset(draw.sample(range(7), draw.randint(1, 4))) for _ in range(draw.randint(0, 6))]
        fewest = min(
            count
            for count in range(8)
            if any(
                all(subset & set(numbers) for subset in sets)
                for numbers in itertools.combinations(range(7), count)
            )
        )
        numbers = hitting_set(sets, fewest)
        assert numbers is not None
        assert len(set(numbers)) == len(numbers) == fewest
        assert all(subset & set(numbers) for subset in sets)
        assert fewest == 0 or hitting_set(sets, fewest - 1) is None


def test_a_smaller_infeasible_subset_elsewhere_is_found() -> None:
    """It is found though leaving out spans ends at a larger subset."""
    many = tuple(Span(f"m{i}", 0, 2, 2) for i in range(6))
    few = (Span("a", 5, 7, 6), Span("b", 5, 7, 6))
    subset, is_smallest = smallest_subset((*many, *few), many, lambda part: lowest_height(part) <= 11)
    assert (set(subset), is_smallest) == (set(few), True)


def test_what_is_not_known_is_not_claimed() -> None:
    items = tuple(Span(f"s{i}", 0, 2, 2) for i in range(6))
    assert smallest_subset(items, items, lambda part: None) == (items, False)
    many = tuple(Span(f"s{i}", 0, 2, 2) for i in range(smallest.MOST_SPANS + 1))
    assert smallest_subset(many, many[:3], lambda part: len(part) < 3) == (many[:3], False)


def test_few_plain_spans_fit_where_their_live_bytes_do() -> None:
    draw = random.Random(2)
    tight = 0
    for _ in range(3000):
        items = random_instance(draw)[: FEWEST_WITH_GAPS - 1]
        if all(span.offset is None and span.alignment == 1 for span in items):
            assert lowest_height(items) == max_live_bytes(items)
            tight += len(items) == FEWEST_WITH_GAPS - 1
    assert tight > 1000
