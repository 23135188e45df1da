import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olla_solvers.recomputation.problem import Execution
from olla_solvers.swapping.choice import choose
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.schedule import within_budget, without_needless, without_stalls
from olla_solvers.swapping.timeline import Timeline
from olla_solvers.swapping.transfers import Link, check


@st.composite
def timelines(draw):
    """Timelines of some operators, with gaps whose arrays are part of what is resident."""
    length = draw(st.integers(4, 16))
    seconds = draw(st.lists(st.sampled_from((0.0, 1.0, 2.5)), min_size=length, max_size=length))
    resident = [draw(st.integers(0, 5)) for _ in range(length)]
    gaps = []
    for array in range(draw(st.integers(1, 6))):
        first, last = sorted(draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2, unique=True)))
        size = draw(st.integers(1, 9))
        for timestep in range(first, last + 1):
            resident[timestep] += size
        if last > first + 1:
            gaps.append(Gap(first, last, array, size))
    executions = tuple(Execution(operator) for operator in range(length))
    return Timeline(executions, tuple(seconds), tuple(resident), tuple(sorted(gaps)))


LINKS = st.sampled_from((Link(1.0, 1.0), Link(3.0, 6.0), Link(6.0, 2.0, 0.5), Link(1e9, 1e9)))


@given(timelines(), LINKS)
def test_what_is_planned_without_stalls_has_none(timeline, link):
    done = without_stalls(timeline, timeline.gaps, link)
    check(done.transfers, len(timeline.seconds))
    assert done.simulation.stalled_seconds == 0
    assert all(map(int.__le__, done.resident_bytes, timeline.resident_bytes))


@given(timelines())
def test_with_a_link_without_end_everything_is_away_for_as_long_as_it_can(timeline):
    done = without_stalls(timeline, timeline.gaps, Link(1e12, 1e12))
    expected = list(timeline.resident_bytes)
    begins = timeline.begins
    for gap in timeline.gaps:
        # Operators that take no time hide no copy.
        for timestep in range(gap.out_after + 1, gap.back_before):
            if (
                begins[gap.out_after + 1] < begins[timestep]
                and begins[timestep + 1] < begins[gap.back_before]
            ):
                expected[timestep] -= gap.size_bytes
    assert all(map(int.__le__, done.resident_bytes, expected))


@given(timelines(), LINKS, st.sampled_from((0.5, 0.7, 0.9)))
def test_a_budget_is_met_if_everything_away_meets_it(timeline, link, share):
    budget = int(share * timeline.peak_bytes)
    done = within_budget(timeline, timeline.gaps, link, budget)
    check(done.transfers, len(timeline.seconds))
    least = list(timeline.resident_bytes)
    for gap in timeline.gaps:
        for timestep in range(gap.out_after + 1, gap.back_before):
            least[timestep] -= gap.size_bytes
    if max(least) <= budget:
        assert done.peak_bytes <= budget
    assert done.seconds == pytest.approx(timeline.begins[-1] + done.simulation.stalled_seconds)


@given(timelines(), LINKS)
def test_nothing_takes_longer_than_allowed(timeline, link):
    budget = timeline.peak_bytes // 2
    most = timeline.begins[-1] + 1.0
    slow = within_budget(timeline, timeline.gaps, link, budget)
    assert within_budget(timeline, timeline.gaps, link, budget, math.inf) == slow
    limited = within_budget(timeline, timeline.gaps, link, budget, most)
    assert limited in (None, slow)


@given(timelines(), LINKS)
def test_transfers_that_are_not_needed_are_left_out(timeline, link):
    budget = timeline.peak_bytes - 1
    done = within_budget(timeline, timeline.gaps, link, budget)
    left = without_needless(timeline, done, link, budget)
    assert set(left.transfers) <= set(done.transfers)
    assert left.peak_bytes <= max(budget, done.peak_bytes)
    assert left.seconds <= done.seconds + 1e-9


@given(timelines(), LINKS)
def test_what_is_chosen_lowers_what_is_beyond_the_budget_without_stalls(timeline, link):
    budget = timeline.peak_bytes * 3 // 4
    chosen = choose(timeline, timeline.gaps, link, budget, lambda gap: 1.0)
    done = without_stalls(timeline, chosen, link)
    assert len(done.transfers) == len(chosen) == len(set(chosen))

    def beyond(resident):
        return sum(max(0, size - budget) for size in resident)

    if chosen:
        assert beyond(done.resident_bytes) < beyond(timeline.resident_bytes)
