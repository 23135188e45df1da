"""Very large instances: the high-pressure intervals first, the rest around them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from olla_solvers.baselines.smartpool import birth_first_fit, size_best_fit, size_first_fit
from olla_solvers.place import high_pressure
from olla_solvers.place.greedy import OutOfTimeError, by_size, greedy
from olla_solvers.place.high_pressure import (
    components,
    has_quiet_times,
    is_very_large,
    load_bytes,
    place_high_pressure,
)
from olla_solvers.place.skyline import longest_lifetime, skyline
from olla_solvers.place.task import Candidate, Effort, Task
from olla_solvers.plan import Span
from olla_solvers.spans import max_live_bytes
from olla_solvers.spans.checks import given_collision
from tests.olla_solvers.place.checking import assert_valid


def stream(count: int, seed: int) -> tuple[Span, ...]:
    """Spans of every size and mostly short lifetimes, a few of them aligned and one given."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        lower = draw.randrange(count)
        upper = lower + 1 + int(draw.expovariate(1 / 30))
        made.append(Span(f"s{number}", lower, upper, 4 * draw.randint(1, 500), draw.choice((1, 1, 4))))
    made[0] = replace(made[0], alignment=4, offset=400)
    return tuple(made)


def test_what_takes_long_after_the_deadline_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(high_pressure, "FILLING_SECONDS", -60.0)
    items = stream(400, 3)
    with pytest.raises(OutOfTimeError, match="400 spans"):
        greedy(items, by_size, deadline=time.monotonic() - 1)
    known = Candidate.of(items, birth_first_fit(items), "birth")
    bound = max_live_bytes(items)
    effort = Effort.of(30)
    assert place_high_pressure(Task(items, bound, bound, effort), known, effort)[0] is known


def test_collisions_of_given_offsets_are_found_as_by_pairs() -> None:
    draw = random.Random(2)
    seen = set()
    for _ in range(400):
        births = [draw.randrange(8) for _ in range(draw.randint(2, 7))]
        items = tuple(
            Span(f"s{i}", t, t + draw.randint(1, 4), draw.randint(0, 3), 1, draw.randrange(12))
            for i, t in enumerate(births)
        )
        pairs = {
            (i, j)
            for (i, first), (j, second) in itertools.permutations(enumerate(items), 2)
            if min(first.size_bytes, second.size_bytes) > 0
            and first.lower < second.upper
            and second.lower < first.upper
            and (first.offset or 0) < (second.offset or 0) + second.size_bytes
            and (second.offset or 0) < (first.offset or 0) + first.size_bytes
        }
        collision = given_collision(items)
        assert collision in pairs if pairs else collision is None
        seen.add(bool(pairs))
    assert seen == {True, False}


@pytest.mark.parametrize("place_all", [size_first_fit, size_best_fit, birth_first_fit])
def test_greedy_is_valid_on_many_spans(place_all: Callable[[Sequence[Span]], tuple[int, ...]]) -> None:
    items = stream(400, 3)
    assert_valid(items, place_all(items))


def test_high_pressure_intervals_first_lower_a_skyline_and_stay_valid() -> None:
    pytest.importorskip("numba")
    lowered = 0
    for seed in range(4):
        items = stream(700, seed)
        bound = max_live_bytes(items)
        known = Candidate.of(items, skyline(items, longest_lifetime), "skyline")
        task = Task(items, bound, bound, Effort.of(60))
        better, _ = place_high_pressure(task, known, task.effort)
        assert_valid(items, better.offsets)
        assert bound <= better.height_bytes <= known.height_bytes
        lowered += better.height_bytes < known.height_bytes
    assert lowered >= 2


def test_large_parts_are_searched_for_their_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(high_pressure, "MOST_SEARCHED", 10)
    monkeypatch.setattr(high_pressure, "LARGE_ARRAYS", 40)
    items = stream(300, 5)
    bound = max_live_bytes(items)
    known = Candidate.of(items, birth_first_fit(items), "birth")
    task = Task(items, bound, bound, Effort.of(60))
    better, _ = place_high_pressure(task, known, task.effort)
    assert_valid(items, better.offsets)
    assert better.height_bytes < known.height_bytes


def test_without_effort_the_known_placement_stays() -> None:
    items = stream(200, 9)
    bound = max_live_bytes(items)
    known = Candidate.of(items, birth_first_fit(items), "birth")
    effort = Effort(time.monotonic() + 60, 1)
    assert place_high_pressure(Task(items, bound, bound, effort), known, effort) == (known, 0)


def test_quiet_times_are_those_with_room_to_spare() -> None:
    effort = Effort.of(60)
    full = tuple(Span(f"s{i}", i, i + 2, 8) for i in range(10))
    assert not has_quiet_times(Task(full, 16, 16, effort))
    peak = (*full, Span("large", 0, 1, 100))
    assert has_quiet_times(Task(peak, 108, 108, effort))


def test_loads_and_components_are_what_their_names_say() -> None:
    items = stream(120, 7)
    for span, load in zip(items, load_bytes(items), strict=True):
        alive = [
            sum(other.size_bytes for other in items if other.lower <= t < other.upper)
            for t in range(span.lower, span.upper)
        ]
        assert load == max(alive)
    parts = list(components(items, range(len(items))))
    assert sorted(index for part in parts for index in part) == list(range(len(items)))
    ends = [max(items[index].upper for index in part) for part in parts]
    starts = [min(items[index].lower for index in part) for part in parts]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_many_separate_steps_are_not_very_large() -> None:
    chain = tuple(Span(f"s{i}", i, i + 1, 1) for i in range(100_000))
    assert not is_very_large(chain)
    assert is_very_large((*chain, Span("long", 0, 100_000, 1)))
