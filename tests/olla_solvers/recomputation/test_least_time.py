import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from olla_solvers.errors import ProblemError
from olla_solvers.recomputation.anneal import anneal
from olla_solvers.recomputation.compiled import as_arrays, compiled_anneal
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.least_time import curve, least_time
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import chain, random_step


def plain_peak(problem) -> int:
    evaluator = Evaluator(prepare(problem))
    return evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes


def check_seeds(seeds: range) -> tuple[int, int]:
    """Compare with all states; return how many budgets some of them meet, and how many were met as fast."""
    possible = fastest = 0
    for seed in seeds:
        step = random_step(seed, 8)
        evaluator = Evaluator(prepare(step.problem))
        count = len(evaluator.instance.units.arrays)
        if count > 4:
            continue
        walks = [evaluator.evaluate(states) for states in itertools.product(range(4), repeat=count)]
        peak = plain_peak(step.problem)
        for budget in (peak, peak - 1, peak * 3 // 4):
            answer = least_time(step.problem, budget)
            check_answer(step, answer.recomputation)
            within = [walk.extra_seconds for walk in walks if walk.is_valid and walk.peak_bytes <= budget]
            if answer.is_met:
                assert min(within) <= answer.recomputation.extra_seconds + 1e-9
                assert answer.bound.extra_seconds <= answer.recomputation.extra_seconds + 1e-9
            assert not (answer.is_met and answer.bound.is_impossible)
            assert answer.recomputation.peak_bytes <= peak
            possible += bool(within)
            fastest += answer.is_met and answer.recomputation.extra_seconds <= min(within) + 1e-9
    return possible, fastest


def test_answers_are_nearly_always_the_fastest_of_all_states():
    possible, fastest = check_seeds(range(150))
    assert possible > 100
    assert fastest >= 0.9 * possible


@pytest.mark.slow
def test_hundreds_of_answers_are_valid():
    possible, fastest = check_seeds(range(100, 1000))
    assert fastest >= 0.9 * possible


def test_the_budget_of_the_plain_order_takes_no_time():
    problem = chain(30)
    answer = least_time(problem, plain_peak(problem))
    assert answer.is_met
    assert answer.recomputation.dropped == ()
    assert answer.recomputation.extra_seconds == answer.bound.extra_seconds == answer.gap_seconds == 0


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 3.0, 2.0)])
def test_a_chain_is_met_close_to_the_bound(seconds):
    problem = chain(60, seconds)
    for share in (0.9, 0.7, 0.5):
        answer = least_time(problem, int(share * plain_peak(problem)))
        assert answer.is_met
        assert answer.gap_seconds <= 0.03 * problem.step_seconds


def test_smaller_budgets_need_no_more_memory_and_larger_ones_no_more_time():
    problem = chain(50, (1.0, 3.0, 2.0))
    peak = plain_peak(problem)
    budgets = [peak * share // 20 for share in (9, 20, 15, 5, 12, 3, 18, 1)]
    answers = curve(problem, budgets)
    assert [answer.budget_bytes for answer in answers] == budgets
    ordered = sorted(answers, key=lambda answer: answer.budget_bytes)
    peaks = [answer.recomputation.peak_bytes for answer in ordered]
    seconds = [answer.recomputation.extra_seconds for answer in ordered]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert ordered[-1].recomputation.extra_seconds == 0


def test_an_impossible_budget_is_proven_and_names_the_operator():
    problem = chain(20)
    answer = least_time(problem, 25)
    assert not answer.is_met
    assert answer.bound.is_impossible
    assert answer.bound.least_bytes > 25
    assert answer.bound.operator is not None
    assert 0 <= answer.largest < 40
    assert answer.gap_seconds == math.inf


def test_the_best_of_several_orders_is_taken():
    step = next(
        step
        for step in map(random_step, range(1000))
        if step.problem.order != step.problem.problem.captured_order
        and plain_peak(step.problem) > plain_peak(_captured(step.problem))
    )
    other = _captured(step.problem)
    answer = least_time((step.problem, other), plain_peak(other))
    assert answer.is_met
    assert answer.recomputation.extra_seconds == 0
    assert tuple(each.operator for each in answer.recomputation.executions) == other.order


def test_the_answer_is_the_same_each_time():
    problem = chain(40, (1.0, 3.0, 2.0))
    assert least_time(problem, 250) == least_time(problem, 250)


def test_nothing_is_searched_after_the_deadline():
    problem = chain(40)
    answer = least_time(problem, 200, deadline=time.monotonic())
    assert answer.recomputation.dropped == ()
    assert not answer.is_met


def test_no_order_is_an_error():
    with pytest.raises(ProblemError, match="no order"):
        least_time((), 100)


def _captured(problem):
    return replace(problem, order=problem.problem.captured_order)


def test_compiled_annealing_finds_what_plain_python_finds():
    evaluator = Evaluator(prepare(chain(20, (1.0, 3.0, 2.0))))
    flat, trace = evaluator.instance.flat, evaluator.trace
    start = plain_states(evaluator.instance)
    plain, best = list(start), list(start)
    seconds = anneal(flat, plain, best, trace, 150, 80.0, 600, 3)
    states, fastest = np.array(start), np.array(start)
    run = compiled_anneal()
    assert run(as_arrays(flat), states, fastest, as_arrays(trace), 150, 80.0, 600, 3) == seconds > 0
    assert states.tolist() == plain
    assert fastest.tolist() == best
