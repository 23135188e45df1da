import itertools
import random

import pytest

from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.published.activation_budget import (
    ActivationCuts,
    dynamic_budget,
    long_operators,
)
from olla_solvers.recomputation.published.knapsack import chosen
from olla_solvers.recomputation.published.mirror import mirrored
from tests.olla_solvers.recomputation.published.chains import chain


def test_the_dynamic_knapsack_finds_the_greatest_value():
    for seed in range(50):
        draw = random.Random(seed)
        values = [draw.randint(1, 20) for _ in range(8)]
        weights = [draw.randint(1, 100) / 200 for _ in range(8)]
        most = draw.randint(0, 100) / 100
        sets = (each for size in range(9) for each in itertools.combinations(range(8), size))
        best = max(
            sum(values[item] for item in each)
            for each in sets
            if sum(weights[item] for item in each) <= most + 1e-9
        )
        taken = chosen(values, weights, most, "dynamic")
        assert sum(values[item] for item in taken) == best
        greedy = chosen(values, weights, most, "greedy")
        assert sum(weights[item] for item in greedy) <= most + 1e-9
        assert sum(values[item] for item in greedy) <= best


def test_operators_that_take_long_per_byte_are_found():
    problem = chain(8, seconds=[9.0, 1.0] * 4)
    assert set(long_operators(prepare(problem))) == {0, 2, 4, 6}


@pytest.mark.parametrize("knapsack", ["dynamic", "greedy"])
def test_a_smaller_share_saves_fewer_bytes_and_costs_more(knapsack):
    instance = prepare(chain(12, seconds=[9.0, 1.0, 1.0] * 4))
    cuts = ActivationCuts(instance, frozenset({0, 3, 6, 9}))
    saved = [cuts.counts(share, knapsack).count(0) for share in (1, 0.75, 0.5, 0.25, 0)]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > saved[2] > saved[-1] == 0
    seconds = [mirrored(instance, cuts.counts(share, knapsack)).extra_seconds for share in (1, 0.5, 0)]
    assert seconds == sorted(seconds)


def test_with_the_whole_budget_nothing_that_takes_long_runs_again():
    problem = chain(12, seconds=[9.0, 1.0, 1.0] * 4)
    instance = prepare(problem)
    cuts = ActivationCuts(instance, frozenset({0, 3, 6, 9}))
    plan = mirrored(instance, cuts.counts(1, "dynamic"))
    assert {0, 3, 6, 9}.isdisjoint(execution.operator for execution in plan.executions if execution.copy)
    assert dynamic_budget(problem, plan.peak_bytes, long={0, 3, 6, 9}).peak_bytes <= plan.peak_bytes
