import math

import pytest

from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.published.methods import HEURISTICS, METHODS
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import random_step


@pytest.mark.parametrize("name", HEURISTICS)
def test_plans_of_random_steps_compute_the_same_and_keep_budgets_that_they_can_reach(name):
    repeated = 0
    for seed in range(60):
        step = random_step(seed, 7 if seed % 4 else 14)
        instance = prepare(step.problem)
        plain = Evaluator(instance).evaluate(plain_states(instance))
        least = METHODS[name](step.problem, 0)
        check_answer(step, least)
        assert least.peak_bytes <= plain.peak_bytes
        last_seconds = math.inf
        for budget in range(least.peak_bytes, plain.peak_bytes + 1):
            answer = METHODS[name](step.problem, budget)
            check_answer(step, answer)
            assert answer.peak_bytes <= budget
            assert answer.extra_seconds <= last_seconds
            last_seconds = answer.extra_seconds
        assert last_seconds == 0
        repeated += bool(least.dropped)
    assert repeated > 3
