import itertools
import random

import pytest

from olla_solvers.problem import Array, Operator, Problem
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import RecomputationProblem
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import random_step


def check_seeds(seeds: range) -> tuple[int, int]:
    """Simulate states of random steps; return how many had repetitions, and how many were refused."""
    repeated = refused = 0
    for seed in seeds:
        step = random_step(seed, 7 if seed % 4 else 14)
        evaluator = Evaluator(prepare(step.problem))
        every = list(
            itertools.islice(itertools.product(range(4), repeat=len(evaluator.instance.units.arrays)), 729)
        )
        for states in every if len(every) < 30 else random.Random(seed).sample(every, 30):
            if not evaluator.evaluate(states).is_valid:
                refused += 1
                continue
            answer = evaluator.recomputation(states)
            check_answer(step, answer)
            repeated += bool(answer.dropped)
    return repeated, refused


def test_every_state_of_random_steps_computes_the_same_with_the_bytes_that_it_says():
    repeated, refused = check_seeds(range(400))
    assert repeated > 500
    assert refused > 20


@pytest.mark.slow
def test_every_state_of_thousands_of_random_steps_computes_the_same():
    check_seeds(range(400, 8000))


def test_without_repetitions_it_is_the_order_itself():
    for seed in range(100):
        step = random_step(seed)
        evaluator = Evaluator(prepare(step.problem))
        answer = evaluator.recomputation(plain_states(evaluator.instance))
        assert answer.dropped == ()
        assert [each.operator for each in answer.executions] == list(step.problem.order)
        check_answer(step, answer)


def test_what_took_over_memory_is_taken_over_in_turn():
    # Three operators in place, one after the other: the first array's memory is that of all.
    operators = tuple(Operator(f"o{number}") for number in range(4))
    arrays = tuple(Array(f"a{number}", 8, number, (number + 1,)) for number in range(3))
    problem = RecomputationProblem(
        Problem(operators, arrays),
        (0, 1, 2, 3),
        (1.0,) * 4,
        ((0,), (1,), (2,)),
        (False, False, False, True),
        takes_over=((0, 1), (1, 2)),
    )
    evaluator = Evaluator(prepare(problem))
    assert evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes == 8
