"""Patience: effort follows what can still be gained, and one limit covers all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from olla_solvers import order, planner
from olla_solvers.effort import apart, patience
from olla_solvers.effort.patience import DEFAULT_SECONDS, LEAST_BYTES, Patience
from olla_solvers.place import auto
from olla_solvers.plan import Span
from olla_solvers.planner import make_plan
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import mlp_step
from tests.olla_solvers.order.large import wide

MIB = 1 << 20


class Clock:
    """Stands for both clocks of the module."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    thread_time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("value", "bound", "beyond"),
    [
        (1000 * MIB, 996 * MIB, False),  # 0.4 %
        (10 * MIB, 9 * MIB, False),  # 1 MiB
        (1000 * MIB, 990 * MIB, True),  # both more
        (10 * MIB, 10 * MIB, False),
    ],
)
def test_only_a_gap_that_matters_is_worth_more_than_a_second(
    clock: Clock, value: int, bound: int, beyond: bool
) -> None:
    default = Patience.of(None)
    assert default.lasts(value, bound) == (value > bound)
    clock.now = 1.5
    assert default.lasts(value, bound) == beyond
    assert not default.first_second_only().lasts(value, bound)
    clock.now = DEFAULT_SECONDS + 0.5
    assert not default.lasts(value, bound)


def test_a_time_limit_asks_for_a_proof(clock: Clock) -> None:
    limited = Patience.of(60.0)
    clock.now = 59.0
    assert limited.lasts(MIB + 1, MIB)
    assert not limited.lasts(MIB, MIB)
    clock.now = 61.0
    assert not limited.lasts(100 * MIB, MIB)


def test_what_is_good_enough_ends_a_search(clock: Clock) -> None:
    patient = replace(Patience.of(60.0), enough_bytes=900 * MIB)
    assert patient.lasts(901 * MIB, 0)
    assert not patient.lasts(900 * MIB, 0)
    assert not patient.is_worth(900 * MIB, 0)


def test_a_process_that_goes_on_has_no_first_second(clock: Clock) -> None:
    default = Patience.of(None)
    clock.now = 2.0
    gone_on = default.handed_over(default.processor_seconds())
    assert not gone_on.lasts(MIB, MIB - 1)
    assert gone_on.lasts(100 * MIB, MIB)
    clock.now = DEFAULT_SECONDS + 0.5
    assert not gone_on.lasts(100 * MIB, MIB)


def scaled(problem: Problem, factor: int) -> Problem:
    document = problem.to_json()
    for array in document["arrays"]:
        array["size"] *= factor
    return Problem.from_json(document)


@pytest.mark.parametrize(("factor", "limit", "expected"), [(1, None, 0), (1000, None, 1), (1, 20.0, 1)])
def test_the_dear_stage_of_ordering_begins_only_if_it_can_gain_enough(
    monkeypatch: pytest.MonkeyPatch, factor: int, limit: float | None, expected: int
) -> None:
    begun = []

    def nothing(function: object, arguments: object, seconds: float, on_answer: object) -> None:
        begun.append((function, seconds))

    monkeypatch.setattr(apart, "last_answer", nothing)
    monkeypatch.setattr(patience, "FIRST_SECONDS", 0.0)
    schedule = order.order(scaled(wide(60, 20), factor), time_limit=limit)
    assert schedule.peak_bytes > schedule.lower_bound_bytes
    assert len(begun) == expected
    if begun:
        assert begun[0][0] is order.go_on
        assert 0 < begun[0][1] <= (limit or patience.LATEST * DEFAULT_SECONDS)


CROSSED = (Span("a", 2, 4, LEAST_BYTES), Span("b", 3, 5, 3 * LEAST_BYTES), Span("c", 1, 3, LEAST_BYTES))


def test_a_process_is_not_started_for_less_time_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "last_answer", lambda *arguments: pytest.fail("started"))
    monkeypatch.setattr(auto, "best_of_heuristics", lambda spans, *rest, **more: _high(spans))
    placement = auto.place_patiently(CROSSED, Patience.of(apart.LEAST_SECONDS / 2), solver="none")
    assert placement.height_bytes > placement.lower_bound_bytes


def _high(spans: tuple[Span, ...]) -> auto.Candidate:
    offsets = [sum(span.size_bytes for span in spans[:index]) for index in range(len(spans))]
    return auto.Candidate.of(spans, offsets, "stacked")


def test_one_limit_covers_ordering_and_placing(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = {}
    ordering, placing = planner.order_patiently, planner.place_patiently

    def order_patiently(problem: Problem, given: Patience, **more: object) -> object:
        deadlines["order"] = given.deadline
        return ordering(problem, given, **more)

    def place_patiently(spans: object, given: Patience, **more: object) -> object:
        deadlines["place"] = given.deadline
        return placing(spans, given, **more)

    monkeypatch.setattr(planner, "order_patiently", order_patiently)
    monkeypatch.setattr(planner, "place_patiently", place_patiently)
    start = patience.time.monotonic()
    make_plan(mlp_step(), time_limit=100.0)
    assert start + 60 < deadlines["order"] < deadlines["place"]
    assert start + 100 <= deadlines["place"] < start + 101
