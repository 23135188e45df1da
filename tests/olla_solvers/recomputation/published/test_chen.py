import math

import pytest

from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.published.low_cost import low_cost
from olla_solvers.recomputation.published.mirror import mirrored
from olla_solvers.recomputation.published.recursive import recursive, recursive_counts
from olla_solvers.recomputation.published.segments import passages, plan_segments, searched_counts, sublinear
from tests.olla_solvers.recomputation.published.chains import chain, residual_chain


@pytest.mark.parametrize("layers", [16, 64, 256])
def test_a_chain_needs_the_root_of_its_length_for_one_more_forward_pass(layers):
    problem = chain(layers)
    plan = sublinear(problem, 0)
    assert plan.peak_bytes <= 2 * math.sqrt(layers) + 2
    assert plan.extra_seconds < layers


@pytest.mark.parametrize("layers", [16, 64, 256])
def test_the_recursive_plan_of_a_chain_needs_the_logarithm_of_its_length(layers):
    instance = prepare(chain(layers))
    counts = recursive_counts(instance, 1, range(layers))
    assert max(counts) == math.ceil(math.log2(layers))
    plan = mirrored(instance, counts)
    assert plan.peak_bytes <= math.log2(layers) + 3
    assert plan.extra_seconds <= layers * math.log2(layers) / 2 + layers


def test_the_recursive_plan_needs_less_than_segments():
    assert recursive(chain(256), 0).peak_bytes < sublinear(chain(256), 0).peak_bytes / 2


def test_the_recursion_keeps_k_results_in_each_part():
    counts = recursive_counts(prepare(chain(26)), 2, range(26))
    assert [unit for unit, count in enumerate(counts) if count == 0] == [8, 16]
    assert counts.count(1) == 2 * 3
    assert max(counts) == 3


def test_algorithm_3_ends_a_segment_at_the_first_candidate_beyond_its_budget():
    instance = prepare(chain(6, sizes=[4, 4, 4, 4, 4, 4]))
    plan = plan_segments(instance, 7, candidates={1, 4})
    assert (plan.counts, plan.kept_bytes, plan.segment_bytes) == ([1, 0, 1, 1, 0, 1], 8, 12)
    plan = plan_segments(instance, 7, candidates=range(6), kept={0})
    assert (plan.counts, plan.kept_bytes) == ([0, 1, 0, 1, 0, 1], 12)


def test_the_search_begins_with_0_and_the_root_of_the_product():
    instance = prepare(chain(100))
    plans = list(searched_counts(instance, range(100)))
    assert len(plans) == 8
    assert set(plans[0]) == {0}
    # x = 100, y = 1: segments of more than 10.
    assert plans[1].count(0) == 9


def test_results_of_low_cost_are_dropped():
    problem = chain(8, seconds=[9.0, 1.0] * 4)
    plan = low_cost(problem, 0, operators=[1, 3, 5, 7])
    assert plan.dropped == (1, 3, 5, 7)
    assert plan.extra_seconds == 4
    assert low_cost(problem, plan.peak_bytes).extra_seconds <= 4


def test_segments_of_a_residual_chain_end_between_its_blocks():
    instance = prepare(residual_chain(5))
    assert [instance.units.arrays[unit] for unit in sorted(passages(instance))] == [
        (0,), (2,), (4,), (6,), (8,), (10,)
    ]  # fmt: skip
    plan = sublinear(residual_chain(64), 0)
    assert plan.peak_bytes < 40
