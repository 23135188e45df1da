"""The exact search against exhaustive enumeration, with every rule on and off; its parts one by one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from olla_solvers.ilp import solver_process
from olla_solvers.ilp.place_program import place_program
from olla_solvers.place.greedy import by_size, greedy
from olla_solvers.place.search import SearchRules, SearchStatus, search
from olla_solvers.place.search.instance import prepare
from olla_solvers.place.search.portfolio import Attempt, attempts, measures
from olla_solvers.placer import place_with
from olla_solvers.plan import Span
from olla_solvers.spans import height_bytes, max_live_bytes
from olla_solvers.spans.checks import given_collision
from tests.olla_solvers.place.checking import assert_valid, lowest_height, random_instance

pytest.importorskip("numba")

RULES = SearchRules.names()
PAIRS_OFF = tuple(itertools.combinations(RULES, 2))


def instances(count: int, seed: int) -> list[tuple[Span, ...]]:
    draw = random.Random(seed)
    made = (random_instance(draw) for _ in range(10 * count))
    return list(itertools.islice((items for items in made if given_collision(items) is None), count))


def assert_lowest(items: Sequence[Span], lowest: int, rules: SearchRules) -> None:
    """Found at the lowest height, and proven impossible right below it."""
    result = search(items, lowest, rules=rules)
    assert result.status is SearchStatus.FOUND
    assert result.offsets is not None
    assert_valid(items, result.offsets)
    assert height_bytes(items, result.offsets) <= lowest
    assert search(items, lowest - 1, rules=rules).status is SearchStatus.INFEASIBLE


def test_every_rule_alone_and_off_agrees_with_enumeration() -> None:
    cases = [SearchRules()]
    cases += [dataclasses.replace(SearchRules(), **{name: False}) for name in RULES]
    nothing = SearchRules(**dict.fromkeys(RULES, False))
    cases += [nothing, *(dataclasses.replace(nothing, **{name: True}) for name in RULES)]
    for number, items in enumerate(instances(400, seed=1)):
        lowest = lowest_height(items)
        for rules in (SearchRules(), cases[number % len(cases)], cases[(number // 3) % len(cases)]):
            assert_lowest(items, lowest, rules)


def test_every_pair_of_rules_off_agrees_with_enumeration() -> None:
    for items, off in zip(instances(3 * len(PAIRS_OFF), seed=2), 3 * PAIRS_OFF, strict=True):
        assert_lowest(
            items, lowest_height(items), dataclasses.replace(SearchRules(), **dict.fromkeys(off, False))
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_search_program_and_enumeration_agree_on_thousands(tmp_path: Path) -> None:
    above_bound = aligned = given = 0
    for items in instances(5000, seed=3):
        lowest = lowest_height(items)
        assert_lowest(items, lowest, SearchRules())
        placement = place_with(items, method="search")
        assert placement.height_bytes == placement.lower_bound_bytes == lowest
        assert _by_program(items, tmp_path) == lowest
        above_bound += lowest > max_live_bytes(items)
        aligned += any(span.alignment > 1 for span in items)
        given += any(span.offset is not None for span in items)
    assert above_bound >= 500
    assert aligned >= 1000
    assert given >= 1000


def _by_program(items: Sequence[Span], folder: Path) -> int:
    """The height that HiGHS finds, run in this process."""
    known = greedy(items, by_size)
    program = place_program(items, known, max_live_bytes(items))
    model = program.model
    rows = [[row.terms, row.sense, row.right] for row in model.rows]
    document = {name: getattr(model, name) for name in ("lower", "upper", "integer", "start", "objective")}
    request = {"solver": "highs", "time_limit": 60, "model": {**document, "rows": rows}}
    (folder / "request.json").write_text(json.dumps(request))
    solver_process.main(str(folder / "request.json"), str(folder / "response.json"))
    response = json.loads((folder / "response.json").read_text())
    assert response["status"] == "optimal"
    return height_bytes(items, program.decode(items, response["values"]))


TIGHT = tuple(
    Span(f"s{number}", lower, upper, size)
    for number, (lower, upper, size) in enumerate(
        [(0, 3, 4), (2, 6, 3), (5, 9, 4), (8, 12, 3), (1, 9, 2), (4, 12, 2), (0, 5, 1), (7, 11, 1)]
    )
)


def dense(count: int, seed: int) -> tuple[Span, ...]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        lower = draw.randrange(count)
        made.append(Span(f"s{number}", lower, lower + 1 + draw.randrange(count // 4), draw.randrange(1, 99)))
    return tuple(made)


def test_the_same_arguments_give_the_same_placement() -> None:
    items = dense(60, seed=5)
    first = search(items, max_live_bytes(items), node_limit=20_000)
    second = search(items, max_live_bytes(items), node_limit=20_000)
    assert dataclasses.replace(first, seconds=0) == dataclasses.replace(second, seconds=0)


WITHOUT_FOLDER = """
import os
from numba import config
from olla_solvers.place.search import driver
driver.load_compiled()
from olla_solvers.place.search import kernel
assert os.path.isdir(kernel.run._cache.cache_path)
assert not config.CACHE_DIR
print(kernel.run._cache.cache_path)
"""


def test_the_search_is_compiled_where_no_folder_can_keep_it() -> None:
    """As in a read-only container, where numba knows only the folder that it is told."""
    told = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FOLDER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **told},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "set NUMBA_CACHE_DIR" in done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_limits_end_a_search_without_a_verdict() -> None:
    items = dense(80, seed=7)
    for limits in ({"node_limit": 5}, {"work_limit": 1}, {"time_limit": 0.0}):
        result = search(items, max_live_bytes(items), **limits)  # type: ignore[arg-type]
        assert result.status is SearchStatus.TIME_LIMIT
        assert result.offsets is None
        assert result.nodes <= 80


def test_given_offsets_that_contradict_the_capacity_are_a_proof() -> None:
    high = Span("a", 0, 2, 4, 1, 8)
    assert search((high,), 11).status is SearchStatus.INFEASIBLE
    assert search((high,), 12).status is SearchStatus.FOUND
    nothing = Span("a", 0, 2, 0, 1, 8)
    assert search((nothing, Span("b", 0, 2, 4)), 7).status is SearchStatus.INFEASIBLE
    assert search((nothing, Span("b", 0, 2, 4)), 8).status is SearchStatus.FOUND
    below = (Span("a", 0, 2, 4, 1, 2), Span("b", 1, 3, 3))
    assert search(below, 8).status is SearchStatus.INFEASIBLE
    assert search(below, 9).offsets == (2, 6)


def test_a_lasting_order_goes_on_from_where_it_was_left() -> None:
    """Turns of any length try the same placements in the same sequence."""
    from olla_solvers.place.search.search_thread import Limits, SearchThread

    items = dense(60, seed=5)
    prepared = prepare(items, max_live_bytes(items), SearchRules())

    def lows(turns: Sequence[int]) -> tuple[int, list[int]]:
        thread = SearchThread(prepared, SearchRules(), np.zeros((1 << 10, 3), dtype=np.int64))
        rank = np.arange(60)
        for nodes in turns:
            thread.proceed(Attempt(0, rank, nodes, "index"), Limits(), (0, 0))
        return thread.nodes, thread.low.tolist()

    assert lows([900]) == lows([1, 2, 50, 51, 400, 900])


def test_measures_count_what_is_alive_with_an_array() -> None:
    items = dense(50, seed=9)
    measured = measures(prepare(items, max_live_bytes(items), SearchRules()))
    for index, span in enumerate(items):
        beside = [other for other in items if other.lower < span.upper and span.lower < other.upper]
        events = [t for other in items for t in (other.lower, other.upper) if span.lower < t < span.upper]
        assert measured["neighbours"][index] == len(beside)
        assert measured["bytes beside"][index] == sum(other.size_bytes for other in beside)
        assert measured["events"][index] == len(events) + 2


def test_orders_do_not_see_how_time_is_stretched() -> None:
    items = dense(50, seed=9)
    times = sorted({time for span in items for time in (span.lower, span.upper)})
    draw = random.Random(3)
    stretched = dict(zip(times, itertools.accumulate(draw.randint(1, 999) for _ in times), strict=True))
    other = [dataclasses.replace(s, lower=stretched[s.lower], upper=stretched[s.upper]) for s in items]
    for before, after in zip(_attempts(items), _attempts(other), strict=True):
        assert before.rank.tolist() == after.rank.tolist()
        assert (before.thread, before.nodes) == (after.thread, after.nodes)


def _attempts(items: Sequence[Span]) -> list[Attempt]:
    prepared = prepare(items, max_live_bytes(items), SearchRules())
    return list(itertools.islice(attempts(prepared, random_orders=4), 40))


def test_budgets_of_lasting_orders_grow_and_random_ones_begin_anew() -> None:
    seen: dict[int | None, list[int]] = {}
    for attempt in _attempts(dense(50, seed=9)):
        assert sorted(attempt.rank.tolist()) == list(range(50))
        seen.setdefault(attempt.thread, []).append(attempt.nodes)
    lasting = [nodes for thread, nodes in seen.items() if thread is not None]
    assert all(list(nodes) == sorted(set(nodes)) for nodes in lasting)
    assert max(seen[None]) < max(max(nodes) for nodes in lasting)


def test_sorting_and_merging_lists() -> None:
    from olla_solvers.place.search.lists import before, sort

    draw = np.random.default_rng(1)
    for count in (1, 2, 7, 40, 200):
        low, rank = draw.integers(0, 9, count), draw.permutation(count)
        arrays = draw.permutation(count)
        sort(low, rank, arrays, count)
        assert arrays.tolist() == np.lexsort([rank, low]).tolist()
        assert all(before(low, rank, first, second) for first, second in itertools.pairwise(arrays))


def test_tight_spans_fill_their_capacity() -> None:
    lowest = lowest_height(TIGHT)
    assert_lowest(TIGHT, lowest, SearchRules())


def test_alignments_that_divide_neither_one_another_nor_the_unit_are_kept() -> None:
    """All sizes are multiples of 12, as is 6, but a block at a multiple of 8 may end at none of 6."""
    items = (
        Span("a", 5, 6, 36, 8),
        Span("b", 1, 2, 48, 8),
        Span("c", 0, 4, 48, 6),
        Span("d", 2, 6, 12, 6),
        Span("e", 2, 3, 12, 8),
        Span("f", 4, 7, 36, 8),
    )
    placement = place_with(items, method="search")
    assert_valid(items, placement.offsets)
    assert placement.height_bytes == lowest_height(items)
    for solver in ("cbc", "highs"):
        placement = place_with(items, method="mip", solver=solver)
        assert_valid(items, placement.offsets)
        assert placement.height_bytes == placement.lower_bound_bytes == lowest_height(items)
