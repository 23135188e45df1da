"""Addresses after swapping, by SmartPool."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from olla_solvers.arrays import Array, ArrayKind, Operator
from olla_solvers.baselines.smartpool import size_best_fit
from olla_solvers.problem import Problem
from olla_solvers.swapping.least_recently_used import least_recently_used
from olla_solvers.swapping.pool import blocks_of, smart_pool
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Transfer
from tests.olla_solvers.swapping.swapped_steps import links, timed_steps


def test_an_array_that_comes_back_is_a_new_block():
    arrays = (Array("a", 10, 0, (7,)), Array("weight", 20, None, (6, 7), ArrayKind.STATIC))
    operators = tuple(Operator(f"operator {index}", 5 * (index == 3)) for index in range(8))
    step = TimedStep(Problem(operators, arrays), tuple(range(8)), (1.0,) * 8)
    # The weight is there at the end of a step and at the beginning of the next, at one address.
    transfers = (Transfer(0, 2, 5, 7, 0), Transfer(7, 9, 13, 14, 1))
    spans = [[(span.lower, span.upper) for span in block] for block in blocks_of(step, transfers)]
    assert spans == [[(0, 2)], [(5, 8)], [(0, 1), (5, 8)], [(3, 4)]]
    pool = smart_pool(step, transfers)
    assert pool.height_bytes == 30
    assert len({span.offset for span in pool.blocks[2]}) == 1


@given(timed_steps(), links, st.floats(0, 1.1))
def test_blocks_hold_the_load_and_do_not_overlap(step, link, share):
    plan = least_recently_used(step, int(share * step.peak_bytes), link, least_bytes=1)
    pool = smart_pool(step, plan.transfers)
    spans = [span for block in pool.blocks for span in block]
    for timestep in range(step.length):
        alive = [span for span in spans if span.lower <= timestep < span.upper]
        assert sum(span.size_bytes for span in alive) == plan.load_bytes[timestep]
        places = sorted((span.offset, span.offset + span.size_bytes) for span in alive if span.size_bytes)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert pool.height_bytes == max((span.offset + span.size_bytes for span in spans), default=0)
    for block in pool.blocks:
        assert len({span.offset for span in block}) == 1
        assert len(block) == 1 or (block[0].lower == 0 and block[1].upper == step.length)


@given(timed_steps())
def test_without_swapping_it_is_smart_pool_s_best_fit(step):
    spans = [span for block in blocks_of(step) for span in block]
    offsets = size_best_fit(spans)
    assert [block[0].offset for block in smart_pool(step).blocks] == list(offsets)
