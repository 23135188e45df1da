"""Planners of others: on demand by recent use, and by the distance to the next use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olla_solvers.arrays import Array, ArrayKind, Operator
from olla_solvers.errors import OptionError
from olla_solvers.problem import Problem
from olla_solvers.swapping.least_recently_used import least_recently_used
from olla_solvers.swapping.longest_reused import longest_reused
from olla_solvers.swapping.methods import METHODS
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link, Transfer
from tests.olla_solvers.swapping.swapped_steps import check, links, network_step, timed_steps

LINK = Link(10.0, 10.0)


def step_of(*arrays: Array, length: int = 8) -> TimedStep:
    problem = Problem(tuple(Operator(f"operator {index}") for index in range(length)), arrays)
    return TimedStep(problem, tuple(range(length)), (1.0,) * length)


def test_what_was_used_longest_ago_makes_room_and_comes_back_on_demand():
    step = step_of(Array("a", 10, 0, (2, 7)), Array("b", 10, 1, (6,)), Array("c", 10, 3, (4,)))
    plan = least_recently_used(step, 20, LINK, least_bytes=1)
    # b was accessed at 1, a at 2; c needs room at 3. A copy takes a second each way, and all wait for it.
    assert plan.transfers == (Transfer(2, 3, 6, 6, 1),)
    assert plan.simulation.stalls == (0, 0, 0, 1, 0, 0, 1, 0)
    assert plan.load_bytes == (10, 20, 20, 20, 20, 10, 20, 10)


def test_an_array_may_make_room_more_than_once():
    step = step_of(
        Array("a", 10, 0, (3, 6)), Array("b", 10, 1, (2,)), Array("c", 10, 4, (5,)), Array("d", 10, 4, ())
    )
    plan = least_recently_used(step, 10, LINK, least_bytes=1)
    assert [(transfer.gone_before, transfer.back_before) for transfer in plan.transfers] == [(1, 3), (4, 6)]


def test_a_weight_makes_room_until_the_next_step_accesses_it():
    weight, work = Array("weight", 10, None, (2,), ArrayKind.STATIC), Array("work", 20, 6, (7,))
    plan = least_recently_used(step_of(weight, work), 20, LINK, least_bytes=1)
    assert plan.transfers == (Transfer(5, 6, 10, 10, 0),)
    assert plan.load_bytes == (0, 0, 10, 10, 10, 10, 20, 20)
    # What the caller fills anew has nothing that may wait.
    renewed = TimedStep(
        *(step_of(weight, work).__getattribute__(name) for name in ("problem", "order", "seconds")),
        frozenset({0}),
    )
    assert least_recently_used(renewed, 20, LINK, least_bytes=1).transfers == ()


def test_what_is_away_when_a_step_begins_was_copied_out_at_the_end_of_the_one_before():
    weight, work = Array("weight", 10, None, (4,), ArrayKind.STATIC), Array("work", 20, 0, (1,))
    plan = least_recently_used(step_of(weight, work), 20, LINK, least_bytes=1)
    assert plan.transfers == (Transfer(7, 8, 12, 12, 0),)
    check(step_of(weight, work), plan)


def test_the_arrays_that_are_reused_last_are_swapped():
    arrays = (
        Array("far", 10, 0, (7,)),
        Array("near", 10, 1, (4,)),
        Array("work", 10, 3, ()),
        Array("weight", 10, None, (0,), ArrayKind.STATIC),
    )
    plan = longest_reused(step_of(*arrays), 30, LINK, least_bytes=1)
    # Its copy in begins one operator ahead, and takes as long as that.
    assert plan.transfers == (Transfer(0, 2, 6, 7, 0),)
    assert plan.extra_seconds == 0
    late = longest_reused(step_of(*arrays), 30, LINK, ahead=0, least_bytes=1)
    assert late.transfers == (Transfer(0, 2, 7, 7, 0),)
    assert late.extra_seconds == 1
    # Weights stay: with both activations away there are still 20.
    assert longest_reused(step_of(*arrays), 0, LINK, least_bytes=1).peak_bytes == 20


def test_copies_in_cannot_begin_after_the_access():
    with pytest.raises(OptionError, match="0 or more operators ahead"):
        longest_reused(step_of(Array("a", 10, 0, (7,))), 10, LINK, ahead=-1)


@given(timed_steps(), links, st.floats(0, 1.1))
def test_the_least_recently_used_leave_no_more_than_each_operator_needs(step, link, share):
    limit_bytes = int(share * step.peak_bytes)
    plan = least_recently_used(step, limit_bytes, link, least_bytes=1)
    check(step, plan)
    assert plan.peak_bytes <= max(limit_bytes, *(needed_bytes(step, moment) for moment in range(step.length)))
    assert all(transfer.out_after + 1 == transfer.gone_before for transfer in plan.transfers)
    assert all(transfer.back_from == transfer.back_before for transfer in plan.transfers)


def needed_bytes(step: TimedStep, timestep: int) -> int:
    """What cannot be on the host at a timestep: what is accessed, what is the caller's, what never waits."""
    needed = step.problem.operators[step.order[timestep]].workspace_bytes
    for index, array in enumerate(step.problem.arrays):
        accesses = step.accesses[index]
        stays = array.kind is ArrayKind.STATIC and (not step.gaps[index] or index in step.renewed)
        is_given = array.kind is ArrayKind.OUTPUT and accesses[0] <= timestep
        needed += array.size_bytes if timestep in accesses or stays or is_given else 0
    return needed


@given(timed_steps(), links, st.floats(0, 1.1), st.integers(0, 3))
def test_the_longest_reused_keep_the_limit_if_they_can(step, link, share, ahead):
    limit_bytes = int(share * step.peak_bytes)
    plan = longest_reused(step, limit_bytes, link, ahead=ahead, least_bytes=1)
    check(step, plan)
    all_away = longest_reused(step, 0, link, ahead=ahead, least_bytes=1)
    assert plan.peak_bytes <= max(limit_bytes, all_away.peak_bytes)


@pytest.mark.parametrize("name", METHODS)
def test_all_have_one_interface(name):
    step = network_step(layers=8)
    # In MiB, so that none is too small.
    large = TimedStep(
        step.problem.resized([array.size_bytes << 20 for array in step.problem.arrays], [0] * step.length),
        step.order,
        step.seconds,
    )
    limit_bytes = int(0.8 * large.peak_bytes)
    plan = METHODS[name](large, limit_bytes, Link(10 << 20, 10 << 20))
    check(large, plan)
    assert 0 < plan.peak_bytes <= limit_bytes
