import math, os
import random
import time

import pytest

from olla_solvers.recomputation.bounds import lower_bound
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.least_time import least_time
from olla_solvers.swapping.bounds import lower_bound_with_swaps
from olla_solvers.swapping.least_time import WithinBudgetAndLink, least_time_with_swaps
from olla_solvers.swapping.simulate import simulate
from olla_solvers.swapping.transfers import Link, away_bytes, check
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import Step, chain, random_step
from tests.olla_solvers.swapping.exhaustive import least_seconds, resident


def plain_peak(problem) -> int:
    evaluator = Evaluator(prepare(problem))
    return evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes


def check_plan(step: Step, answer: WithinBudgetAndLink, link: Link) -> None:
    """Check bytes, times and contents of an answer, independent of how it was found."""
    executions = answer.recomputation.executions
    check_answer(step, answer.recomputation)
    check(answer.transfers, len(executions))
    there, accesses = resident(step, executions)
    arrays = step.problem.problem.arrays
    for transfer in answer.transfers:
        timesteps = accesses[transfer.array, transfer.copy]
        assert transfer.out_after in timesteps
        assert transfer.back_before in timesteps
        assert not any(transfer.out_after < timestep < transfer.back_before for timestep in timesteps)
    sizes = [arrays[transfer.array].size_bytes for transfer in answer.transfers]
    away = away_bytes(answer.transfers, sizes, len(executions))
    assert answer.peak_bytes == max(map(int.__sub__, there, away), default=0)
    seconds = [step.problem.seconds[execution.operator] for execution in executions]
    simulation = simulate(seconds, answer.transfers, sizes, link)
    assert answer.simulation == simulation
    extra = simulation.seconds - step.problem.step_seconds
    assert answer.extra_seconds == pytest.approx(extra, abs=1e-9)
    if answer.is_met:
        assert answer.bound.extra_seconds <= extra + 1e-9


def check_seeds(seeds: range) -> tuple[int, int, int]:
    """Compare with every choice; return how many budgets can be met, are, and are met as fast."""
    possible = met = fastest = 0
    for seed in seeds:
        draw = random.Random(seed)
        step = random_step(seed, 7)
        problem = step.problem
        speed = draw.choice((0.5, 1.0, 3.0, 10.0))
        link = Link(speed, draw.choice((speed, 2 * speed)), draw.choice((0.0, 0.0, 0.5)))
        peak = plain_peak(problem)
        for budget in {peak - 1, peak * 3 // 4}:
            least = least_seconds(step, budget, link)
            if least is None:
                continue
            answer = least_time_with_swaps(problem, budget, link)
            check_plan(step, answer, link)
            bound = lower_bound_with_swaps(problem, budget, link)
            assert bound.extra_seconds <= least - problem.step_seconds + 1e-9
            assert bound.extra_seconds <= lower_bound(problem, budget).extra_seconds + 1e-9
            alone = least_time(problem, budget)
            if alone.is_met:
                assert answer.is_met
                assert answer.extra_seconds <= alone.recomputation.extra_seconds + 1e-9
            if os.environ.get('SHOW') and (least < answer.simulation.seconds-1e-9 or answer.is_met < (least<math.inf)):
                print(seed, budget, peak, least-problem.step_seconds, answer.is_met, answer.extra_seconds, answer.simulation.stalled_seconds, link)
            possible += least < math.inf
            met += answer.is_met
            if answer.is_met:
                assert answer.simulation.seconds >= least - 1e-9
                fastest += answer.simulation.seconds <= least + 1e-9
    return possible, met, fastest


def test_answers_are_mostly_the_fastest_of_all_choices():
    possible, met, fastest = check_seeds(range(120))
    assert possible > 100
    assert met >= 0.95 * possible
    assert fastest >= 0.85 * possible


@pytest.mark.slow
def test_thousands_of_answers_are_valid():
    possible, met, fastest = check_seeds(range(120, 2000))
    assert met >= 0.95 * possible
    assert fastest >= 0.85 * possible
