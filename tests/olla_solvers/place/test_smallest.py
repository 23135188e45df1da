"""Hitting sets and smallest conflicts against enumeration."""

from __future__ import annotations

import itertools
import random

from olla_solvers.infeasible import smallest
from olla_solvers.infeasible.smallest import FEWEST_WITH_GAPS, hitting_set, smallest_conflict
from olla_solvers.place.bound import max_live_bytes
from olla_solvers.plan import Span
from tests.olla_solvers.place.checking import lowest_height, random_instance


def test_hitting_sets_are_as_small_as_enumeration_finds() -> None:
    draw = random.Random(1)
    for _ in range(200):
        sets = [frozenset(draw.sample(range(7), draw.randint(1, 4))) for _ in range(draw.randint(0, 6))]
        fewest = min(
            count
            for count in range(8)
            if any(all(each & set(some) for each in sets) for some in itertools.combinations(range(7), count))
        )
        found = hitting_set(sets, fewest)
        assert found is not None
        assert len(set(found)) == len(found) == fewest
        assert all(each & set(found) for each in sets)
        assert fewest == 0 or hitting_set(sets, fewest - 1) is None


def test_a_smaller_conflict_elsewhere_is_found() -> None:
    """Where leaving out spans ends at a larger set, the smallest one is found all the same."""
    many = tuple(Span(f"m{i}", 0, 2, 2) for i in range(6))
    few = (Span("a", 5, 7, 6), Span("b", 5, 7, 6))
    answer = smallest_conflict((*many, *few), many, lambda some: lowest_height(some) <= 11)
    assert (set(answer.spans), answer.is_smallest) == (set(few), True)


def test_what_is_not_known_is_not_claimed() -> None:
    items = tuple(Span(f"s{i}", 0, 2, 2) for i in range(6))
    answer = smallest_conflict(items, items, lambda some: None)
    assert (answer.spans, answer.is_smallest) == (items, False)
    many = tuple(Span(f"s{i}", 0, 2, 2) for i in range(smallest.MOST_SPANS + 1))
    assert not smallest_conflict(many, many[:3], lambda some: len(some) < 3).is_smallest


def test_few_plain_spans_fit_where_their_live_bytes_do() -> None:
    draw = random.Random(2)
    tight = 0
    for _ in range(3000):
        items = random_instance(draw)[: FEWEST_WITH_GAPS - 1]
        if all(span.offset is None and span.alignment == 1 for span in items):
            assert lowest_height(items) == max_live_bytes(items)
            tight += len(items) == FEWEST_WITH_GAPS - 1
    assert tight > 1000
