"""Candidates and scores by their definitions in section IV-A and IV-B."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from olla_solvers.arrays import Array, ArrayKind, Operator
from olla_solvers.problem import Problem
from olla_solvers.swapping.autoswap.candidates import candidates, least_load_bytes
from olla_solvers.swapping.autoswap.scores import (
    Score,
    all_scores,
    area_of_absence,
    standardised,
    submodular_durations,
)
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link
from tests.olla_solvers.swapping.swapped_steps import links, timed_steps

MIB = 2**20


def step_of(*arrays: Array, seconds: float = 1.0, length: int = 8) -> TimedStep:
    problem = Problem(tuple(Operator(f"operator {index}") for index in range(length)), arrays)
    return TimedStep(problem, tuple(range(length)), (seconds,) * length)


def test_candidates_are_large_and_wait_across_the_peak():
    step = step_of(
        Array("across", 4 * MIB, 0, (7,)),
        Array("twice", 2 * MIB, 1, (2, 6)),
        Array("small", MIB - 1, 0, (7,)),
        Array("accessed at the peak", 30 * MIB, 4, (5,)),
        Array("before", 2 * MIB, 0, (2,)),
        Array("given", 3 * MIB, 0, (7,), ArrayKind.OUTPUT),
        Array("weight", 5 * MIB, None, (1, 6), ArrayKind.STATIC),
        Array("momentum", 6 * MIB, None, (7,), ArrayKind.STATIC),
    )
    gaps = candidates(step)
    assert [(gap.array, gap.out_after, gap.back_before) for gap in gaps] == [
        (0, 0, 7),
        (1, 2, 6),
        (6, 1, 6),
        (7, 7, 15),
    ]
    # All of them away leaves the momentum's timestep: across, weight, momentum, small, given and a bit.
    small, given = MIB - 1, 3 * MIB
    assert least_load_bytes(step) == max(
        30 * MIB + small + given, 4 * MIB + 5 * MIB + 6 * MIB + small + given
    )


def test_what_the_caller_fills_anew_does_not_wait_for_the_next_step():
    arrays = (Array("examples", 2 * MIB, None, (0,), ArrayKind.STATIC), Array("work", MIB, 3, (4,)))
    step = step_of(*arrays)
    assert len(candidates(step)) == 1
    assert candidates(TimedStep(step.problem, step.order, step.seconds, frozenset({0}))) == ()


def test_scores_of_an_example():
    """Loads of 10, 30, 30, 60, 30, 30, 10 in seven seconds; the link takes a second each way for 10."""
    step = step_of(
        Array("outer", 10, 0, (6,)),
        Array("inner", 20, 1, (5,)),
        Array("peak", 30, 3, ()),
        length=7,
    )
    assert step.load_bytes.tolist() == [10, 30, 30, 60, 30, 30, 10]
    gaps = candidates(step, least_bytes=1)
    scores = all_scores(step, gaps, Link(10.0, 10.0))
    assert scores[Score.DURATION].tolist() == [5 - 2, 3 - 4]
    assert scores[Score.AREA].tolist() == [3 * 10, -1 / 20]
    assert scores[Score.WEIGHTED].tolist() == [30 + 30 + 60 + 30 + 30, 30 + 60 + 30]
    # Without the outer array the inner one sees 10 less in each of its three timesteps.
    assert scores[Score.SUBMODULAR].tolist() == [180, 90]


def test_of_arrays_that_are_needed_too_soon_a_large_one_has_the_larger_area():
    small, large = Gap(0, 2, 0, 10), Gap(0, 2, 1, 20)
    assert area_of_absence(-3.0, small) < area_of_absence(-3.0, large) < 0


@given(timed_steps(), links)
def test_scores_follow_their_definitions(step, link):
    gaps = candidates(step, least_bytes=1)
    scores = all_scores(step, gaps, link)
    clock = [0.0]
    for seconds in step.durations * 2:
        clock.append(clock[-1] + seconds)

    def area(gap, load):
        return sum(
            load[moment % step.length] * step.durations[moment % step.length]
            for moment in range(gap.out_after + 1, gap.back_before)
        )

    load = step.load_bytes.tolist()
    for index, gap in enumerate(gaps):
        copies = gap.size_bytes / link.out_bytes_per_second + gap.size_bytes / link.in_bytes_per_second
        duration = clock[gap.back_before] - clock[gap.out_after + 1] - copies
        assert scores[Score.DURATION][index] == pytest.approx(duration)
        by_size = duration * gap.size_bytes if duration >= 0 else duration / gap.size_bytes
        assert scores[Score.AREA][index] == pytest.approx(by_size)
        assert scores[Score.WEIGHTED][index] == pytest.approx(area(gap, load))
    # The submodular score by the book: choose, take out of the load, score again.
    left = dict(enumerate(gaps))
    values = submodular_durations(step, gaps)
    while left:
        largest = max(area(gap, load) for gap in left.values())
        chosen = max(left, key=lambda index: values[index])
        assert values[chosen] == pytest.approx(largest) == pytest.approx(area(left[chosen], load))
        gap = left.pop(chosen)
        for moment in range(gap.out_after + 1, gap.back_before):
            load[moment % step.length] -= gap.size_bytes


def test_standardised_values_have_mean_0_and_deviation_1():
    values = standardised(np.array([1.0, 2.0, 6.0]))
    assert values.mean() == pytest.approx(0)
    assert values.std() == pytest.approx(1)
    assert standardised(np.array([3.0, 3.0])).tolist() == [0, 0]
    assert standardised(np.array([])).tolist() == []
