import itertools
import time

import pytest

from olla_solvers.errors import ProblemError
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.least_memory import least_memory
from olla_solvers.recomputation.problem import RecomputationProblem
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import chain, random_step


def test_answers_are_executable_in_time_and_no_worse_than_without():
    better = 0
    for seed in range(300):
        step = random_step(seed, 14)
        evaluator = Evaluator(prepare(step.problem))
        plain = evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes
        for share in (0.0, 0.1, 0.5):
            most = share * step.problem.step_seconds
            answer = least_memory(step.problem, most)
            check_answer(step, answer)
            assert answer.extra_seconds <= most
            assert answer.peak_bytes <= plain
            better += answer.peak_bytes < plain
    assert better > 50


def test_answers_are_seldom_worse_than_the_best_of_all_states():
    worse = tried = 0
    for seed in range(80):
        step = random_step(seed, 12)
        evaluator = Evaluator(prepare(step.problem))
        count = len(evaluator.instance.units.arrays)
        if not 1 <= count <= 5:
            continue
        most = 0.2 * step.problem.step_seconds
        walks = map(evaluator.evaluate, itertools.product(range(4), repeat=count))
        best = min(each.peak_bytes for each in walks if each.is_valid and each.extra_seconds <= most)
        reached = least_memory(step.problem, most).peak_bytes
        assert reached >= best
        tried += 1
        worse += reached > best
    assert worse <= 0.15 * tried


def test_more_time_reaches_less_memory():
    problem = chain(40)
    peaks = [least_memory(problem, share * 80).peak_bytes for share in (0, 0.05, 0.1, 0.3)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] == 410
    assert peaks[-1] < 300


def test_the_answer_is_the_same_each_time():
    problem = chain(60, (1.0, 3.0, 2.0))
    assert least_memory(problem, 12.0) == least_memory(problem, 12.0)


def test_nothing_is_repeated_after_the_deadline():
    answer = least_memory(chain(40), 40.0, deadline=time.monotonic())
    assert answer.dropped == ()


def test_small_steps_take_little_processor_time():
    problem = chain(300, (1.0, 3.0, 2.0))
    begin = time.process_time()
    least_memory(problem, 0.01 * problem.step_seconds)
    assert time.process_time() - begin < 1.0


def test_a_maker_of_another_phase_is_refused():
    problem = chain(3)
    late = RecomputationProblem(
        problem.problem, problem.order, problem.seconds, ((5,), *problem.makers[1:]), problem.phases
    )
    with pytest.raises(ProblemError, match="'a0' cannot be made again by operators of another phase"):
        least_memory(late, 1.0)


def test_lists_that_do_not_fit_are_refused():
    problem = chain(3)
    short = RecomputationProblem(
        problem.problem, problem.order, problem.seconds[1:], problem.makers, problem.phases
    )
    with pytest.raises(ProblemError, match="seconds"):
        least_memory(short, 1.0)
