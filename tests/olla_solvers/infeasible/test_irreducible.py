"""Capacities: kept, proven too small with the spans that cannot fit together named, or left open."""

from __future__ import annotations

import itertools
import random

import pytest

from olla_solvers.errors import InfeasibleError, NoSolutionError
from olla_solvers.infeasible.irreducible import CannotFitError, fewest_alive_above
from olla_solvers.placer import place_with
from olla_solvers.plan import Span
from olla_solvers.spans import max_live_bytes
from olla_solvers.spans.checks import given_collision
from tests.olla_solvers.place.checking import assert_valid, lowest_height, random_instance

pytest.importorskip("numba")


def test_a_capacity_is_kept_or_an_irreducible_infeasible_subset_is_named() -> None:
    draw = random.Random(12)
    kinds = {"fits": 0, "live bytes": 0, "search": 0}
    for _ in range(160):
        items = random_instance(draw)
        if given_collision(items) is not None:
            continue
        lowest, bound = lowest_height(items), max_live_bytes(items)
        placement = place_with(items, capacity_bytes=lowest)
        assert_valid(items, placement.offsets)
        assert placement.height_bytes <= lowest
        kinds["fits"] += 1
        with pytest.raises(CannotFitError) as caught:
            place_with(items, capacity_bytes=lowest - 1)
        named = [span for span in items if span.name in caught.value.names]
        assert len(named) == len(caught.value.names) > 0
        assert all(repr(span.name) in str(caught.value) for span in named)
        assert lowest_height(named) > lowest - 1
        assert caught.value.is_irreducible
        for span in named:
            assert lowest_height([other for other in named if other is not span]) <= lowest - 1
        assert caught.value.is_smallest
        for fewer in itertools.combinations(items, len(named) - 1):
            assert given_collision(fewer) is None
            assert lowest_height(fewer) <= lowest - 1
        kinds["live bytes" if lowest == bound else "search"] += 1
    assert kinds["search"] >= 8
    assert kinds["live bytes"] >= 40


def test_the_fewest_live_spans_are_named() -> None:
    draw = random.Random(13)
    for _ in range(200):
        items = random_instance(draw)
        capacity = draw.randint(1, 20)
        alive = [
            [span for span in items if span.lower <= t < span.upper]
            for t in range(max(s.upper for s in items))
        ]
        counts = [
            count
            for now in alive
            for count in range(1, len(now) + 1)
            if any(sum(s.size_bytes for s in part) > capacity for part in itertools.combinations(now, count))
        ]
        fewest = fewest_alive_above(items, capacity)
        assert len(fewest) == min(counts, default=0)
        assert not fewest or sum(span.size_bytes for span in fewest) > capacity


def test_a_capacity_that_stays_open_is_another_error() -> None:
    draw = random.Random(2)
    items = [
        Span(f"s{i}", lower, lower + draw.randint(20, 90), draw.randint(50, 999))
        for i, lower in enumerate(draw.randrange(150) for _ in range(150))
    ]
    with pytest.raises(NoSolutionError, match="nor ruled out"):
        place_with(items, capacity_bytes=max_live_bytes(items), method="skyline")


def test_a_given_offset_above_the_capacity_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"'high' is given \[8, 12\)"):
        place_with((Span("high", 0, 1, 4, 1, 8), Span("low", 0, 1, 1)), capacity_bytes=10)
