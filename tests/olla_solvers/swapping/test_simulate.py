from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olla_solvers.errors import ProblemError
from olla_solvers.swapping.simulate import simulate
from olla_solvers.swapping.transfers import Link, Transfer, away_bytes, host_bytes

LINK = Link(10.0, 10.0)


def test_copies_that_have_the_time_stall_nothing():
    transfer = Transfer(out_after=0, gone_before=2, back_from=3, back_before=4, array=0)
    simulation = simulate([1.0] * 5, [transfer], [10], LINK)
    assert simulation.seconds == 5.0
    assert simulation.stalls == (0.0,) * 5
    assert simulation.out_spans == ((1.0, 2.0),)
    assert simulation.in_spans == ((3.0, 4.0),)


def test_a_wait_stalls_until_its_copy_is_done():
    transfer = Transfer(out_after=0, gone_before=1, back_from=3, back_before=3, array=0)
    simulation = simulate([1.0] * 4, [transfer], [15], LINK)
    assert simulation.stalls == (0.0, 1.5, 0.0, 1.5)
    assert simulation.seconds == 7.0
    assert simulation.stalled_seconds == 3.0


def test_copies_of_a_direction_come_one_after_the_other_and_those_of_both_at_once():
    first = Transfer(out_after=0, gone_before=4, back_from=5, back_before=9, array=0)
    second = Transfer(out_after=0, gone_before=4, back_from=5, back_before=9, array=1)
    simulation = simulate([1.0] * 10, [first, second], [10, 20], LINK)
    assert simulation.out_spans == ((1.0, 2.0), (2.0, 4.0))
    assert simulation.in_spans == ((5.0, 6.0), (6.0, 8.0))
    late = Transfer(out_after=4, gone_before=6, back_from=7, back_before=8, array=2)
    both = simulate([1.0] * 10, [first, late], [10, 10], LINK)
    assert both.out_spans[1] == both.in_spans[0] == (5.0, 6.0)


def test_the_link_takes_its_latency_for_each_copy():
    link = Link(10.0, 20.0, latency_seconds=0.5)
    transfer = Transfer(out_after=0, gone_before=1, back_from=2, back_before=2, array=0)
    simulation = simulate([1.0] * 3, [transfer], [10], link)
    assert simulation.stalls == (0.0, 1.5, 1.0)


def test_what_is_away_between_steps_is_copied_in_by_the_next_one():
    """A weight that is read at timestep 1 is away from timestep 3 to timestep 0 of the next step."""
    transfer = Transfer(out_after=1, gone_before=3, back_from=4, back_before=5, array=0)
    first = simulate([1.0] * 4, [transfer], [10], LINK)
    assert first.stalled_seconds == 0.0
    second = simulate([1.0] * 4, [transfer], [20], LINK, steps=2)
    assert second.stalls == (0.0, 1.0, 0.0, 1.0)
    assert away_bytes([transfer], [10], 4) == [0, 0, 0, 10]
    assert host_bytes([transfer], [10], 4) == [10, 10, 10, 10]


@pytest.mark.parametrize("places", [(1, 1, 2, 3), (0, 1, 1, 2), (0, 1, 3, 2), (0, 2, 3, 5), (4, 5, 6, 7)])
def test_a_transfer_without_time_is_an_error(places):
    with pytest.raises(ProblemError, match="4 timesteps has no time"):
        simulate([1.0] * 4, [Transfer(*places, array=0)], [1], LINK)


@pytest.mark.parametrize("arguments", [(0.0, 1.0), (1.0, -1.0), (1.0, 1.0, -1.0), (1.0, 1.0, float("inf"))])
def test_a_link_that_copies_nothing_is_an_error(arguments):
    with pytest.raises(ProblemError, match="a link copies"):
        Link(*arguments)


@st.composite
def swapped_steps(draw):
    seconds = draw(st.lists(st.integers(0, 4), min_size=4, max_size=12))
    transfers, sizes = [], []
    for array in range(draw(st.integers(1, 4))):
        out, gone, back, needed = sorted(
            draw(st.lists(st.integers(0, len(seconds) - 1), min_size=4, max_size=4, unique=True))
        )
        transfers.append(Transfer(out, gone, back, needed, array))
        sizes.append(draw(st.integers(0, 5)))
    return seconds, transfers, sizes


@given(swapped_steps())
def test_the_simulation_keeps_its_rules(step):
    seconds, transfers, sizes = step
    link = Link(1.0, 1.0)
    simulation = simulate(seconds, transfers, sizes, link)
    assert simulation.seconds == sum(seconds) + simulation.stalled_seconds
    # When each operator begins and ends.
    begins, clock = [], 0.0
    for own, stall in zip(seconds, simulation.stalls, strict=True):
        clock += stall
        begins.append(clock)
        clock += own
    ends = [begin + own for begin, own in zip(begins, seconds, strict=True)]
    waited = {at: ends[at - 1] if at else 0.0 for at in range(len(seconds))}
    for spans, asked, needed, is_out in (
        (simulation.out_spans, [t.out_after for t in transfers], [t.gone_before for t in transfers], True),
        (simulation.in_spans, [t.back_from for t in transfers], [t.back_before for t in transfers], False),
    ):
        for index, (start, end) in enumerate(spans):
            assert end - start == sizes[index]
            assert start >= (ends[asked[index]] if is_out else ends[asked[index] - 1])
            assert end <= begins[needed[index]]
            waited[needed[index]] = max(waited[needed[index]], end)
        for (start, end), (next_start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert next_start >= end or start == next_start == end
    # No operator begins later than what it waits for ends.
    assert all(begins[at] <= waited[at] for at in range(len(seconds)))
