"""Selection and schedule (sections IV-D and IV-E)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.arrays import Array, ArrayKind, Operator
from olla_solvers.problem import Problem
from olla_solvers.swapping.autoswap.candidates import candidates, least_load_bytes
from olla_solvers.swapping.autoswap.planner import AutoSwap
from olla_solvers.swapping.autoswap.schedule import latest_starts, schedule
from olla_solvers.swapping.autoswap.scores import Score
from olla_solvers.swapping.autoswap.selection import select
from olla_solvers.swapping.autoswap.weights import only
from olla_solvers.swapping.gaps import Gap, remove
from olla_solvers.swapping.plan import plan_of
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link, Transfer
from tests.olla_solvers.swapping.swapped_steps import check, links, timed_steps


def chain(layers: int, size: int, seconds: float = 1.0, head: int = 0) -> TimedStep:
    """Forward makes an array a layer, backward reads them in reverse; the loss between has an array, too."""
    length = 2 * layers + 1
    arrays = [
        Array(f"x{index}", size, index, tuple(sorted({index + 1, length - 1 - index} - {index})))
        for index in range(layers)
    ]
    arrays.append(Array("loss", head, layers, ()))
    operators = tuple(Operator(f"operator {index}") for index in range(length))
    return TimedStep(Problem(operators, tuple(arrays)), tuple(range(length)), (seconds,) * length)


def test_those_of_highest_priority_are_selected_until_the_load_is_within_its_limit():
    step = chain(4, 10, head=10)
    gaps = candidates(step, least_bytes=1)
    assert step.peak_bytes == 50
    # The last layer's array is read at the peak.
    assert [gap.array for gap in gaps] == [0, 1, 2]
    assert [gap.array for gap in select(step, gaps, [1, 2, 3], 40)] == [2]
    assert [gap.array for gap in select(step, gaps, [1, 2, 3], 39)] == [2, 1]
    assert select(step, gaps, [1, 2, 3], 50) == ()
    assert len(select(step, gaps, [1, 2, 3], 0)) == 3


FIGURE_7 = chain(5, 20, head=20)
"""The load rises to 120 and falls again; for 60 three arrays of 20 are selected, as in Figure 7."""


def selected() -> tuple[Gap, ...]:
    return select(FIGURE_7, candidates(FIGURE_7, least_bytes=1), [5, 4, 3, 2], 60)


def test_the_example_of_figure_7_with_a_link_that_is_fast_enough():
    assert FIGURE_7.peak_bytes == 120
    assert [(gap.array, gap.out_after, gap.back_before) for gap in selected()] == [
        (0, 1, 10),
        (1, 2, 9),
        (2, 3, 8),
    ]
    # A copy takes as long as an operator: each is done before the load would pass 60.
    link = Link(20.0, 20.0)
    plan = plan_of(FIGURE_7, schedule(FIGURE_7, selected(), 60, link), link)
    assert {transfer.array: transfer for transfer in plan.transfers} == {
        0: Transfer(1, 3, 9, 10, 0),
        1: Transfer(2, 4, 8, 9, 1),
        2: Transfer(3, 5, 7, 8, 2),
    }
    assert plan.load_bytes == (20, 40, 60, 60, 60, 60, 40, 40, 40, 40, 20)
    assert plan.extra_seconds == 0


def test_the_example_of_figure_7_with_operators_that_are_delayed():
    """Copies take two operators' time: LOAD' passes the limit, LOAD'' does not, since operators wait."""
    link = Link(10.0, 10.0)
    relaxed = plan_of(FIGURE_7, schedule(FIGURE_7, selected(), 120, link), link)
    assert relaxed.extra_seconds == 0
    assert relaxed.peak_bytes > 60
    plan = plan_of(FIGURE_7, schedule(FIGURE_7, selected(), 60, link), link)
    assert plan.load_bytes == (20, 40, 60, 60, 60, 60, 60, 60, 60, 40, 20)
    # Forward waits for copies out; backward for copies in, which began when there was room.
    assert plan.simulation.stalls == (0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1)
    ends = [span[1] for span in plan.simulation.out_spans]
    starts = [span[0] for span in plan.simulation.out_spans]
    assert sorted(starts)[1:] == sorted(ends)[:-1]
    assert plan.extra_seconds == least_extra_seconds(FIGURE_7, selected(), 60, link)


def least_extra_seconds(step: TimedStep, gaps: Sequence[Gap], limit_bytes: int, link: Link) -> float:
    """The fastest of all choices of when arrays are gone and back; copies come in the sequence of need."""
    stays = [
        [
            None,
            *(
                Transfer(gap.out_after, gone, back, gap.back_before, gap.array)
                for gone, back in itertools.combinations(range(gap.out_after + 1, gap.back_before + 1), 2)
            ),
        ]
        for gap in gaps
    ]
    plans = (
        plan_of(step, sorted(filter(None, chosen), key=lambda stay: stay.back_before), link)
        for chosen in itertools.product(*stays)
        if is_within(step, chosen, limit_bytes)
    )
    return min(plan.extra_seconds for plan in plans)


def is_within(step: TimedStep, chosen: Sequence[Transfer | None], limit_bytes: int) -> bool:
    load = step.load_bytes.copy()
    for stay in filter(None, chosen):
        remove(load, stay.gone_before, stay.back_from, step.problem.arrays[stay.array].size_bytes)
    return load.max() <= limit_bytes


def test_copies_in_are_scheduled_backwards_one_after_the_other():
    gaps = candidates(FIGURE_7, least_bytes=1)
    assert [(gap.out_after, gap.back_before) for gap in gaps] == [(1, 10), (2, 9), (3, 8), (4, 7)]
    # A copy takes a timestep and a half; the last one has time for one timestep alone.
    assert latest_starts(FIGURE_7, gaps, Link(20.0, 20 / 1.5)) == [8, 7, 5, 5]
    # Copies that would begin in the step before begin as soon as they can.
    assert latest_starts(FIGURE_7, gaps, Link(20.0, 2.0)) == [2, 3, 4, 5]


def test_what_is_needed_before_it_is_gone_stays():
    step = chain(4, 10, head=10)
    assert schedule(step, candidates(step, least_bytes=1), 50, Link(1.0, 1.0)) == ()


def test_weights_wait_from_one_step_to_the_next():
    """A momentum is read and written at the end alone: it is away from then until the next step's end."""
    momentum = Array("momentum", 10, None, (6, 7), ArrayKind.STATIC)
    work = Array("work", 40, 3, (4,))
    operators = tuple(Operator(f"operator {index}") for index in range(8))
    step = TimedStep(Problem(operators, (momentum, work)), tuple(range(8)), (1.0,) * 8)
    (gap,) = candidates(step, least_bytes=1)
    link = Link(10.0, 10.0)
    plan = plan_of(step, schedule(step, [gap], 40, link), link)
    assert plan.transfers == (Transfer(7, 9, 13, 14, 0),)
    assert plan.load_bytes == (10, 0, 0, 40, 40, 10, 10, 10)
    assert plan.extra_seconds == 0


def test_the_limit_is_kept_where_one_step_decides_otherwise_than_the_next():
    arrays = (
        Array("a", 33, None, (4,), ArrayKind.STATIC),
        Array("b", 22, None, (7,), ArrayKind.STATIC),
        Array("c", 17, 1, (5,)),
        Array("d", 11, None, (0, 8), ArrayKind.STATIC),
    )
    operators = tuple(Operator(f"operator {index}") for index in range(9))
    step = TimedStep(Problem(operators, arrays), tuple(range(9)), (0.0,) * 9)
    plan = AutoSwap.of(step, Link(4.0, 1.0), 1).plan(int(0.3 * step.peak_bytes), only(Score.AREA))
    check(step, plan)
    assert plan.peak_bytes == least_load_bytes(step, 1)


@given(timed_steps(), links, st.floats(0, 1.1), st.sampled_from(list(Score)))
def test_plans_keep_the_limit(step, link, share, score):
    limit_bytes = int(share * step.peak_bytes)
    plan = AutoSwap.of(step, link, 1).plan(limit_bytes, only(score))
    check(step, plan)
    assert plan.peak_bytes <= max(limit_bytes, least_load_bytes(step, 1))
    if limit_bytes >= step.peak_bytes:
        assert plan.transfers == ()
    for transfer in plan.transfers:
        assert transfer.gone_before < transfer.back_from


@given(timed_steps(), st.floats(0.5, 1.0))
def test_a_link_that_takes_no_time_stalls_nothing(step, share):
    link = Link(1e30, 1e30)
    plan = AutoSwap.of(step, link, 1).plan(int(share * step.peak_bytes), only(Score.SUBMODULAR))
    assert plan.extra_seconds == pytest.approx(0, abs=1e-9)


@settings(max_examples=30)
@given(st.integers(1, 3), st.sampled_from([5.0, 10.0, 20.0]), st.sampled_from([5.0, 10.0, 20.0]), st.data())
def test_no_choice_of_places_is_faster_than_all_of_them(layers, out_speed, in_speed, data):
    step = chain(layers, 10, head=data.draw(st.integers(0, 20)))
    gaps = candidates(step, least_bytes=1)
    limit_bytes = int(step.load_without(gaps).max()) + data.draw(st.integers(0, 20))
    link = Link(out_speed, in_speed)
    plan = plan_of(step, schedule(step, gaps, limit_bytes, link), link)
    least = least_extra_seconds(step, gaps, limit_bytes, link)
    assert plan.extra_seconds >= least - 1e-9
