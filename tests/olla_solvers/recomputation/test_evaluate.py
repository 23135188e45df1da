import itertools
import random

import pytest

from olla_solvers.problem import Array, Operator, Problem
from olla_solvers.recomputation.compiled import is_available
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


def check_moments(seeds: range) -> tuple[int, int]:
    """Simulate states with moments; return how many repetitions, and how many of these came twice."""
    repeated = twice = 0
    for seed in seeds:
        draw = random.Random(seed)
        step = random_step(seed, 14)
        evaluator = Evaluator(prepare(step.problem))
        if len(step.problem.order) < 4:
            continue
        positions = sorted(draw.sample(range(1, len(step.problem.order)), 3))
        for _ in range(10):
            dropped = [
                None if draw.random() < 0.2 else tuple(at for at in range(3) if draw.random() < 0.5)
                for _ in evaluator.instance.units.arrays
            ]
            states = evaluator.states_of(positions, dropped)
            if not evaluator.evaluate(states).is_valid:
                continue
            answer = evaluator.recomputation(states)
            check_answer(step, answer)
            repeated += bool(answer.dropped)
            twice += any(execution.copy > 1 for execution in answer.executions)
    return repeated, twice


def test_states_with_moments_compute_the_same_with_the_bytes_that_they_say():
    repeated, twice = check_moments(range(300))
    assert repeated > 300
    assert twice > 10


@pytest.mark.slow
def test_thousands_of_states_with_moments_compute_the_same():
    check_moments(range(300, 4000))


def test_a_unit_is_kept_until_the_first_moment_at_which_it_is_dropped():
    # x is made at 0 and read at 1, 3, 5 by backward; dropped at timestep 4, it runs again before 5.
    operators = tuple(Operator(f"o{number}") for number in range(6))
    arrays = (Array("x", 8, 0, (1, 3, 5)), Array("y", 4, 1, (2,)), Array("z", 4, 2, (3,)))
    problem = RecomputationProblem(
        Problem(operators, arrays),
        (0, 1, 2, 3, 4, 5),
        (1.0,) * 6,
        ((0,), (), ()),
        (False, False, False, True, True, True),
    )
    evaluator = Evaluator(prepare(problem))
    answer = evaluator.recomputation(evaluator.states_of((4,), ((0,),)))
    assert [execution.operator for execution in answer.executions] == [0, 1, 2, 3, 4, 0, 5]
    assert evaluator.recomputation(evaluator.states_of((4,), ((),))).dropped == ()


@pytest.mark.slow
def test_every_state_of_thousands_of_random_steps_computes_the_same():
    check_seeds(range(400, 8000))


@pytest.mark.skipif(not is_available(), reason="needs numba")
def test_compiled_walks_write_the_same():
    for seed in range(0, 40, 2):
        step = random_step(seed, 14)
        instance = prepare(step.problem)
        plain, compiled = Evaluator(instance), Evaluator(instance)
        compiled.compile()
        position = len(step.problem.order) // 2
        dropped = [(0,) if unit % 2 else () for unit in range(len(instance.units.arrays))]
        moments = compiled.states_of((position,), dropped)
        assert moments == plain.states_of((position,), dropped)
        for states in ([1] * len(dropped), [3] * len(dropped), moments):
            evaluation = compiled.evaluate(states)
            assert evaluation == plain.evaluate(states)
            if not evaluation.is_valid:
                continue
            written = compiled.excess(evaluation, 10)
            assert written == plain.excess(evaluation, 10)
            timesteps, versions = evaluation.timesteps, evaluation.versions
            for name in ("operator", "copy", "timestep_bytes"):
                assert getattr(compiled.trace, name)[:timesteps] == getattr(plain.trace, name)[:timesteps]
            for name in ("array", "version_bytes", "first", "last_early", "first_late", "last"):
                assert getattr(compiled.trace, name)[:versions] == getattr(plain.trace, name)[:versions]
            assert compiled.recomputation(states) == plain.recomputation(states)


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
