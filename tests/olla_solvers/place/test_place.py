"""Placements: valid, at least as high as their bound, and with a named solver as low as possible."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings

from olla_solvers.errors import InfeasibleError, OptionError, ProblemError, SolverUnavailableError
from olla_solvers.order import order
from olla_solvers.place import place, spans_of
from olla_solvers.place import skyline as skylines
from olla_solvers.place.skyline import earliest_birth, largest_area, longest_lifetime, reversed_time, skyline
from olla_solvers.placer import place_with
from olla_solvers.plan import SolverEffect, SolverStatus, Span
from olla_solvers.problem import Array, Operator, Problem
from olla_solvers.spans import height_bytes, max_live_bytes
from tests.olla_solvers.graphs import alexnet_step, spans
from tests.olla_solvers.place.checking import assert_valid, lowest_height

MANY = settings(max_examples=300, deadline=None, derandomize=True)
FEW = settings(max_examples=20, deadline=None, derandomize=True)


@MANY
@given(spans(12))
def test_every_skyline_is_valid(items: tuple[Span, ...]) -> None:
    for rule in (longest_lifetime, largest_area, earliest_birth):
        for rows in (items, reversed_time(items)):
            offsets = skyline(rows, rule)
            assert_valid(items, offsets)
            assert height_bytes(items, offsets) >= max_live_bytes(items)


@MANY
@given(spans(40))
def test_spans_looked_at_one_by_one_or_at_once_are_placed_alike(items: tuple[Span, ...]) -> None:
    placements = []
    for few in (1, len(items) + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(skylines, "FEW", few)
            placements.append(skyline(items, longest_lifetime))
    assert placements[0] == placements[1]


@MANY
@given(spans(10, given=True))
def test_given_offsets_stay(items: tuple[Span, ...]) -> None:
    placement = place_with(items, solver="none")
    assert_valid(items, placement.offsets)
    assert placement.lower_bound_bytes <= placement.height_bytes


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_the_program_is_as_low_as_any_placement(solver: str) -> None:
    @FEW
    @given(spans(5, given=True))
    def check(items: tuple[Span, ...]) -> None:
        placement = place(items, solver=solver)
        assert_valid(items, placement.offsets)
        assert placement.height_bytes == lowest_height(items)
        assert placement.solver.status is SolverStatus.OPTIMAL
        assert placement.solver.bound_bytes == placement.height_bytes

    check()


GAP = tuple(
    Span(f"s{number}", lower, upper, size)
    for number, (lower, upper, size) in enumerate(
        [(0, 3, 4), (2, 6, 3), (5, 9, 4), (8, 12, 3), (1, 9, 2), (4, 12, 2), (0, 5, 1), (7, 11, 1)]
    )
)


@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_a_named_solver_really_runs(solver: str) -> None:
    placement = place(GAP, solver=solver)
    assert_valid(GAP, placement.offsets)
    assert placement.solver.solver == solver
    assert placement.solver.status is SolverStatus.OPTIMAL
    assert placement.solver.effect in (SolverEffect.CONFIRMED, SolverEffect.IMPROVED)
    assert placement.solver.variables > len(GAP)


def scattered(count: int, seed: int = 11) -> tuple[Span, ...]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        lower = draw.randrange(count)
        made.append(Span(f"s{number}", lower, lower + 1 + draw.randrange(count // 3), draw.randrange(1, 999)))
    return tuple(made)


def test_gurobi_beyond_its_licence_names_cbc() -> None:
    items = scattered(150)
    assert place_with(items, method="skylines").height_bytes > max_live_bytes(items)
    with pytest.raises(SolverUnavailableError, match=r"too large .* solver='cbc'"):
        place(items, solver="gurobi")


def test_a_time_limit_keeps_the_incumbent() -> None:
    items = scattered(60)
    start = time.monotonic()
    placement = place(items, solver="cbc", time_limit=1)
    assert time.monotonic() - start < 4
    assert_valid(items, placement.offsets)
    assert placement.height_bytes <= place_with(items, method="skylines").height_bytes


def test_a_limit_in_the_root_node_of_cbc_proves_nothing() -> None:
    """Interrupted there, CBC logs bounds of thirteen digits, and skylines passed for lowest."""
    pytest.importorskip("numba")
    draw = random.Random(1)
    for _ in range(6):
        births = [draw.randrange(35) for _ in range(30)]
        items = tuple(
            Span(f"s{i}", lower, lower + draw.randint(1, 25), draw.randrange(1, 999))
            for i, lower in enumerate(births)
        )
        lowest = place_with(items, method="search").height_bytes
        placement = place_with(items, method="mip", solver="cbc", time_limit=0.2)
        assert placement.lower_bound_bytes <= lowest
        assert placement.solver.bound_bytes is None or placement.solver.bound_bytes <= lowest


def test_thousands_of_spans_are_placed() -> None:
    items = scattered(4500)
    assert_valid(items, skyline(items, longest_lifetime))


def test_time_between_deaths_and_births_is_free() -> None:
    chain = tuple(Span(f"s{i}", i, i + 1, 10) for i in range(20))
    placement = place(chain, solver="none")
    assert set(placement.offsets) == {0}
    assert placement.proved_by == "live bytes"


def test_alignment_is_kept() -> None:
    items = (Span("a", 0, 4, 10), Span("b", 0, 4, 64, alignment=64), Span("c", 1, 3, 7, alignment=16))
    assert_valid(items, place(items, solver="none").offsets)
    assert place(items, solver="cbc").height_bytes == lowest_height(items)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ((Span("a", 0, 1, 4), Span("a", 0, 1, 4)), "'a' occurs twice"),
        ((Span("a", 3, 3, 4),), "empty lifetime"),
        ((Span("a", 0, 1, -4),), "negative size"),
        ((Span("a", 0, 1, 4, 0),), "alignment 0"),
        ((Span("a", 0, 1, 4, 8, 4),), "multiple of its alignment"),
        (
            (Span("a", 0, 1, 2**61), Span("b", 0, 1, 2**61 + 1)),
            r"together reach 2\*\*62 B; the largest is 'b'",
        ),
        ((Span("a", 0, 1, 4, 2**61), Span("b", 0, 1, 4, 2**61)), r"with their alignments.*2\*\*62 B"),
        ((Span("a", 0, 1, 4, 1, 2**62), Span("b", 0, 1, 4)), r"'a' .*2\*\*62"),
        ((Span("a", 0, 2**62, 4),), r"'a' .*2\*\*62"),
    ],
)
def test_bad_spans_are_refused(items: tuple[Span, ...], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        place(items, solver="none")


@pytest.mark.parametrize("limit", [float("nan"), -1])
def test_a_time_limit_is_a_number_of_seconds(limit: float) -> None:
    """With one that is no number no deadline ever came."""
    with pytest.raises(OptionError, match="time_limit"):
        place((Span("a", 0, 2, 4),), time_limit=limit)


def test_colliding_given_offsets_are_named() -> None:
    items = (Span("a", 0, 2, 8, 1, 0), Span("b", 1, 3, 8, 1, 4))
    with pytest.raises(InfeasibleError, match="'a' and 'b'"):
        place(items, solver="none")


def test_no_spans() -> None:
    for solver in ("none", "cbc"):
        assert place((), solver=solver).height_bytes == 0


def test_spans_of_an_order_cover_arrays_and_workspaces() -> None:
    problem = Problem(
        (Operator("A", 8), Operator("B")),
        (Array("x", 4, 0, (1,), alignment=4), Array("workspace of A", 2, 1)),
    )
    extents = {span.name: (span.lower, span.upper, span.size_bytes) for span in spans_of(problem, (0, 1))}
    assert extents == {"x": (0, 2, 4), "workspace of A": (1, 2, 2), "workspace of A'": (0, 1, 8)}


def test_alexnet_is_free_of_fragmentation() -> None:
    problem = alexnet_step()
    placement = place(spans_of(problem, order(problem, solver="none").order), solver="none")
    assert placement.height_bytes == placement.lower_bound_bytes
