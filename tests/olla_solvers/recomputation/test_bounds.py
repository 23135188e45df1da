import itertools
import math

import pytest

from olla_solvers.recomputation.bounds import lower_bound
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.least_memory import least_memory
from tests.olla_solvers.recomputation.exhaustive import Exhaustive
from tests.olla_solvers.recomputation.steps import random_step


def check_seeds(seeds: range) -> tuple[float, int]:
    """Compare with all sequences; return the mean share that bounds prove, and proofs of impossibility."""
    shares, impossible = [], 0
    for seed in seeds:
        step = random_step(seed, 6)
        if len(step.problem.problem.planned) > 7:
            continue
        evaluator = Evaluator(prepare(step.problem))
        peak = evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes
        exhaustive = Exhaustive(step)
        walks = [
            evaluator.evaluate(states)
            for states in itertools.product(range(4), repeat=len(evaluator.instance.units.arrays))
        ]
        for budget in {peak - 1, peak * 3 // 4, peak // 2}:
            least = exhaustive.least_seconds(budget)
            bound = lower_bound(step.problem, budget)
            assert bound.extra_seconds <= least + 1e-9
            assert bound.least_bytes <= budget or bound.is_impossible
            fixed = exhaustive.least_seconds(budget, orders=False)
            within = [walk for walk in walks if walk.is_valid and walk.peak_bytes <= budget]
            fastest = min((walk.extra_seconds for walk in within), default=math.inf)
            assert least <= fixed <= fastest
            if 0 < least < math.inf:
                shares.append(bound.extra_seconds / least)
            impossible += bound.is_impossible
    return sum(shares) / len(shares), impossible


def test_no_sequence_is_below_the_bound():
    share, impossible = check_seeds(range(250))
    # Of a few arrays a fraction would do where a whole one goes.
    assert share > 0.03
    assert impossible > 50


@pytest.mark.slow
def test_no_sequence_of_thousands_of_steps_is_below_the_bound():
    check_seeds(range(250, 5500))


def test_least_memory_reaches_no_peak_that_is_proven_impossible():
    for seed in range(200):
        step = random_step(seed, 16)
        answer = least_memory(step.problem, math.inf)
        bound = lower_bound(step.problem, answer.peak_bytes)
        assert not bound.is_impossible
        assert bound.extra_seconds <= answer.extra_seconds + 1e-9
        assert bound.least_bytes <= answer.peak_bytes
