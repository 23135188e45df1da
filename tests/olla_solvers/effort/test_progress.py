from __future__ import annotations

import itertools
import pickle

import pytest

from olla_solvers.effort.progress import Improvement, ProgressLog
from olla_solvers.order import order
from olla_solvers.placer import place_with
from olla_solvers.plan import Span
from olla_solvers.plan_json import plan_from_json, plan_to_json
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.order.large import wide

WORSE_THAN_NEEDED = (Span("a", 2, 4, 1), Span("b", 3, 5, 3), Span("c", 1, 3, 1))


def fork() -> Problem:
    """Captured order keeps both branches' large arrays; the other order does not."""
    names = ("source", "left", "right", "shrink left", "shrink right", "join")
    return Problem(
        operators=tuple(Operator(name) for name in names),
        arrays=(
            Array("s", 1, producer=0, consumers=(1, 2)),
            Array("l", 100, producer=1, consumers=(3,)),
            Array("r", 100, producer=2, consumers=(4,)),
            Array("sl", 1, producer=3, consumers=(5,)),
            Array("sr", 1, producer=4, consumers=(5,)),
        ),
    )


def assert_monotone(progress: tuple[Improvement, ...]) -> None:
    for one, other in itertools.pairwise(progress):
        assert one.seconds <= other.seconds
        assert one.value_bytes >= other.value_bytes
        assert one.bound_bytes <= other.bound_bytes
        assert (one.value_bytes, one.bound_bytes) != (other.value_bytes, other.bound_bytes)


def test_the_log_keeps_what_is_better_and_nothing_else() -> None:
    log = ProgressLog(0.0, bound_bytes=3)
    for value, bound, method in ((10, 0, "a"), (11, 0, "b"), (10, 3, "c"), (9, 0, "d"), (12, 9, "e")):
        log.note(value, bound, method)
    kept = [
        (improvement.value_bytes, improvement.bound_bytes, improvement.method)
        for improvement in log.improvements
    ]
    assert kept == [(10, 3, "a"), (9, 3, "d"), (9, 9, "e")]


@pytest.mark.parametrize("solver", ["auto", "none", "highs"])
def test_ordering_goes_from_the_captured_order_to_the_best(solver: str) -> None:
    schedule = order(fork(), solver=solver)
    assert schedule.progress[0].value_bytes == 201
    assert schedule.progress[0].method == "captured"
    assert schedule.progress[-1].value_bytes == schedule.peak_bytes == 102
    assert schedule.progress[-1].bound_bytes == schedule.lower_bound_bytes
    assert_monotone(schedule.progress)


@pytest.mark.parametrize("method", ["auto", "skyline", "search", "caching-allocator"])
def test_placing_ends_at_the_height_that_it_returns(method: str) -> None:
    placement = place_with(WORSE_THAN_NEEDED, method=method)
    assert placement.progress[-1].value_bytes == placement.height_bytes
    assert placement.progress[-1].bound_bytes == placement.lower_bound_bytes == 4
    assert_monotone(placement.progress)


def test_an_observer_hears_of_every_improvement() -> None:
    heard: list[tuple[str, Improvement]] = []
    plan = make_plan(fork(), observer=lambda stage, improvement: heard.append((stage, improvement)))
    assert heard == [(stage, note) for stage in ("order", "place") for note in plan.progress[stage]]


def test_an_observer_hears_of_what_another_process_finds() -> None:
    heard: list[Improvement] = []
    schedule = order(wide(300, 60), time_limit=8, observer=heard.append)
    here = [note for note in heard if note.seconds < schedule.progress[0].seconds + 1]
    assert len(heard) > len(here), "the process goes on after the first second"
    assert_monotone(tuple(heard))


def test_an_observer_stays_in_its_process() -> None:
    log = ProgressLog(0.0, observer=lambda improvement: None)
    log.note(3, 1, "a")
    assert pickle.loads(pickle.dumps(log)).improvements == log.improvements


def test_a_plan_keeps_both_on_disk_too() -> None:
    plan = make_plan(fork())
    assert plan.progress["order"][-1].value_bytes == plan.peak_bytes
    assert plan.progress["place"][-1].value_bytes == plan.buffer_bytes
    assert plan_from_json(plan_to_json(plan)) == plan
