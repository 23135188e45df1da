import itertools
import random

from olla_solvers.recomputation.evaluate import Evaluator
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import Execution
from olla_solvers.recomputation.published.mirror import mirrored
from olla_solvers.recomputation.published.sequence import measure, numbered
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import random_step


def test_a_sequence_is_counted_as_the_evaluator_counts_it():
    for seed in range(150):
        evaluator = Evaluator(prepare(random_step(seed, 7 if seed % 4 else 14).problem))
        units = len(evaluator.instance.units.arrays)
        for states in itertools.islice(itertools.product(range(3), repeat=units), 1, 200, 7):
            if evaluator.evaluate(states).is_valid:
                answer = evaluator.recomputation(states)
                assert measure(evaluator.instance, answer.executions) == answer


def test_mirror_counts_of_0_and_1_are_states_of_the_evaluator():
    valid = 0
    for seed in range(150):
        evaluator = Evaluator(prepare(random_step(seed, 7 if seed % 4 else 14).problem))
        units = len(evaluator.instance.units.arrays)
        for counts in itertools.islice(itertools.product(range(2), repeat=units), 40):
            if evaluator.evaluate(counts).is_valid:
                assert mirrored(evaluator.instance, counts) == evaluator.recomputation(counts)
                valid += 1
    assert valid > 500


def test_every_mirror_count_computes_the_same_with_the_bytes_that_it_says():
    several = 0
    for seed in range(200):
        step = random_step(seed, 7 if seed % 4 else 14)
        instance = prepare(step.problem)
        draw = random.Random(seed)
        for _ in range(6):
            answer = mirrored(instance, [draw.randint(0, 3) for _ in instance.units.arrays])
            check_answer(step, answer)
            several += any(execution.copy > 1 for execution in answer.executions)
    assert several > 50


def test_copies_are_numbered_as_they_run():
    executions = [Execution(0), Execution(0, 3), Execution(1, 0, ((0, 3),)), Execution(0, 1)]
    assert numbered(executions) == [
        Execution(0),
        Execution(0, 1),
        Execution(1, 0, ((0, 1),)),
        Execution(0, 2),
    ]
