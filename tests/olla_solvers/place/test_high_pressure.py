"""Very large instances: the crowded times first, the rest around them."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from olla_solvers.place import high_pressure
from olla_solvers.place.bisection import Effort, Task, search_briefly
from olla_solvers.place.bound import max_live_bytes
from olla_solvers.place.candidate import Found
from olla_solvers.place.greedy import OutOfTimeError, by_birth, by_size, given_collision, greedy
from olla_solvers.place.high_pressure import (
    components,
    has_quiet_times,
    improve_by_crowds,
    is_very_large,
    load_bytes,
)
from olla_solvers.place.skyline import RULES, skyline
from olla_solvers.plan import Span
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
    known = Found.of(items, greedy(items, by_birth), "birth")
    bound = max_live_bytes(items)
    effort = Effort(time.monotonic() + 30, None)
    assert improve_by_crowds(Task(items, bound, bound, False, "none", effort), known, effort)[0] is known


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
            for (i, one), (j, two) in itertools.permutations(enumerate(items), 2)
            if min(one.size_bytes, two.size_bytes) > 0
            and one.lower < two.upper
            and two.lower < one.upper
            and (one.offset or 0) < (two.offset or 0) + two.size_bytes
            and (two.offset or 0) < (one.offset or 0) + one.size_bytes
        }
        found = given_collision(items)
        assert found in pairs if pairs else found is None
        seen.add(bool(pairs))
    assert seen == {True, False}


@pytest.mark.parametrize("best_fit", [False, True])
@pytest.mark.parametrize("rule", [by_size, by_birth])
def test_greedy_is_valid_on_many_spans(rule: object, best_fit: bool) -> None:
    items = stream(400, 3)
    assert_valid(items, greedy(items, by_size if rule is by_size else by_birth, best_fit=best_fit))


def test_crowded_times_first_lowers_a_skyline_and_stays_valid() -> None:
    pytest.importorskip("numba")
    lowered = 0
    for seed in range(4):
        items = stream(700, seed)
        bound = max_live_bytes(items)
        known = Found.of(items, skyline(items, RULES["longest lifetime"]), "skyline")
        task = Task(items, bound, bound, False, "none", Effort(time.monotonic() + 60, None))
        better, _ = improve_by_crowds(task, known, task.effort)
        assert_valid(items, better.offsets)
        assert bound <= better.height_bytes <= known.height_bytes
        lowered += better.height_bytes < known.height_bytes
    assert lowered >= 2


def test_large_parts_are_searched_for_their_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    from olla_solvers.place import high_pressure

    monkeypatch.setattr(high_pressure, "MOST_SEARCHED", 10)
    monkeypatch.setattr(high_pressure, "LARGE_ARRAYS", 40)
    items = stream(300, 5)
    bound = max_live_bytes(items)
    known = Found.of(items, greedy(items, by_birth), "birth")
    task = Task(items, bound, bound, False, "none", Effort(time.monotonic() + 60, None))
    better, _ = improve_by_crowds(task, known, task.effort)
    assert_valid(items, better.offsets)
    assert better.height_bytes < known.height_bytes


def test_a_brief_search_keeps_what_it_cannot_lower() -> None:
    pytest.importorskip("numba")
    items = stream(200, 9)
    bound = max_live_bytes(items)
    task = Task(items, bound, bound, False, "none", Effort(time.monotonic() + 60, None))
    known = Found.of(items, greedy(items, by_birth), "birth")
    better, work = search_briefly(task, known, task.effort)
    assert_valid(items, better.offsets)
    assert better.height_bytes == bound < known.height_bytes
    assert work > 0
    kept, _ = search_briefly(task, known, Effort(time.monotonic() + 60, 1))
    assert kept is known


def test_quiet_times_are_those_with_room_to_spare() -> None:
    effort = Effort(time.monotonic() + 60, None)
    full = tuple(Span(f"s{i}", i, i + 2, 8) for i in range(10))
    assert not has_quiet_times(Task(full, 16, 16, False, "none", effort))
    peak = (*full, Span("large", 0, 1, 100))
    assert has_quiet_times(Task(peak, 108, 108, False, "none", effort))


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
