"""Every method by name: valid, with given offsets and alignments kept; the papers' methods by hand."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given, settings

from olla_solvers.baselines.caching_allocator import ROUNDING_BYTES, replay
from olla_solvers.baselines.smartpool import birth_first_fit, size_best_fit, size_first_fit
from olla_solvers.errors import ProblemError, SolverUnavailableError
from olla_solvers.ilp.place_program import place_program
from olla_solvers.paper.pyramid import pyramid
from olla_solvers.place import auto, place
from olla_solvers.placer import METHODS, place_with
from olla_solvers.plan import Span
from olla_solvers.spans import height_bytes, max_live_bytes
from olla_solvers.spans.checks import given_collision
from tests.olla_solvers.graphs import spans
from tests.olla_solvers.place.checking import assert_valid, lowest_height, random_instance

PROGRAMS = ("mip", "pyramid-mip")


@pytest.mark.parametrize("method", [name for name in METHODS if name not in PROGRAMS])
def test_methods_keep_given_offsets_and_alignments(method: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(spans(9, given=True))
    def check(items: tuple[Span, ...]) -> None:
        placement = place_with(items, method=method, solver="none", time_limit=5)
        assert_valid(items, placement.offsets)
        assert placement.height_bytes == height_bytes(items, placement.offsets)
        assert max_live_bytes(items) <= placement.lower_bound_bytes <= placement.height_bytes

    check()


@pytest.mark.parametrize("method", PROGRAMS)
@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_programs_keep_given_offsets_and_alignments(method: str, solver: str) -> None:
    draw = random.Random(5)
    cases = [items for items in (random_instance(draw) for _ in range(20)) if given_collision(items) is None]
    for items in cases[:8]:
        placement = place_with(items, method=method, solver=solver)
        assert_valid(items, placement.offsets)
        assert placement.solver.solver == solver
        if method == "mip":
            assert placement.height_bytes == placement.lower_bound_bytes == lowest_height(items)


def test_auto_is_lowest_and_says_what_proved_it() -> None:
    pytest.importorskip("numba")
    draw = random.Random(6)
    proofs = set()
    for _ in range(300):
        items = random_instance(draw)
        if given_collision(items) is None:
            placement = place_with(items, solver="none")
            assert placement.height_bytes == placement.lower_bound_bytes == lowest_height(items)
            proofs.add(placement.proved_by)
    assert proofs == {"live bytes", "search"}


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_smallest() -> None:
    given_walls = (
        Span("a", 0, 2, 4, 1, 6),
        Span("b", 0, 2, 4, 1, 14),
        Span("c", 0, 2, 3),
    )
    assert size_first_fit(given_walls) == (6, 14, 0)
    assert size_best_fit(given_walls) == (6, 14, 10)
    full = (*given_walls, Span("d", 1, 2, 9))
    assert size_best_fit(full)[3] == 18


def test_greedy_by_size_places_the_largest_first_and_by_birth_the_eldest() -> None:
    items = (Span("young", 1, 3, 9), Span("old", 0, 2, 2))
    assert size_first_fit(items) == (0, 9)
    assert birth_first_fit(items) == (2, 0)


def test_the_pyramid_nests_lifetimes() -> None:
    items = (
        Span("inner", 2, 4, 3),
        Span("outer", 0, 6, 5),
        Span("middle", 1, 5, 4),
        Span("aside", 4, 6, 2),
    )
    assert [span.offset for span in pyramid(items)] == [9, 0, 5, None]


def test_the_pyramid_goes_around_given_spans() -> None:
    items = (Span("wall", 0, 2, 4, 1, 2), Span("long", 0, 4, 3), Span("short", 1, 3, 2, 4))
    assert [span.offset for span in pyramid(items)] == [2, 6, 12]


def test_the_program_states_no_pair_that_given_offsets_settle() -> None:
    items = (Span("a", 0, 2, 4, 1, 0), Span("b", 0, 2, 4, 1, 4), Span("c", 0, 2, 4))
    program = place_program(items, (0, 4, 8), 12)
    settled = [i for i, whole in enumerate(program.model.integer) if whole]
    assert len(settled) == 2
    bounds = {(program.model.lower[i], program.model.upper[i]) for i in settled}
    assert (0, 0) in bounds


def test_the_caching_allocator_reuses_what_it_freed() -> None:
    size = 2 * ROUNDING_BYTES
    items = (Span("a", 0, 2, size), Span("b", 1, 3, size), Span("c", 2, 4, size - 1))
    assert replay(items) == (0, size, 0)
    far = replay((Span("wall", 0, 9, 100, 1, 7), Span("odd", 0, 2, 5, 4096), Span("d", 0, 2, 5, 4096)))
    assert far[0] == 7
    assert far[1] >= 107
    assert far[1] % 4096 == far[2] % 4096 == 0
    assert abs(far[1] - far[2]) >= 5


def test_without_numba_skylines_are_kept_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(auto, "is_available", lambda: False)
    gap = _with_gap()[0]
    placement = place(gap, solver="none")
    assert_valid(gap, placement.offsets)
    assert placement.found_by.count("pip install 'olla-fx[search]'") == 1
    assert "olla-fx[search]" not in place(gap[:1], solver="none").found_by


def _with_gap() -> list[tuple[Span, ...]]:
    """Instances that no skyline places at the bound."""
    draw = random.Random(8)
    made = (random_instance(draw) for _ in range(400))
    return [
        items
        for items in made
        if given_collision(items) is None
        and place_with(items, method="skylines").height_bytes > max_live_bytes(items)
    ]


def test_the_search_by_name_needs_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    from olla_solvers.place.search import driver

    driver.compilation_seconds.cache_clear()
    monkeypatch.setattr(driver, "is_available", lambda: False)
    with pytest.raises(SolverUnavailableError, match=r"pip install 'olla-fx\[search\]'"):
        place_with((Span("a", 0, 2, 1),), method="search")


def test_unknown_methods_and_programs_without_a_solver_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"unknown method 'best'.*skyline"):
        place_with((), method="best")
    with pytest.raises(SolverUnavailableError, match="name its solver"):
        place_with((Span("a", 0, 2, 1),), method="mip", solver="none")
