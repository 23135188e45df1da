import math
import random
import time
from dataclasses import replace

import pytest

from olla_solvers.recomputation.bounds import lower_bound
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.least_time import least_time
from olla_solvers.recomputation.published.sequence import measure
from olla_solvers.swapping.bounds import lower_bound_with_swaps
from olla_solvers.swapping.joint_planner import WithinBudgetAndLink
from olla_solvers.swapping.least_time import least_time_with_swaps
from olla_solvers.swapping.simulate import simulate_settled
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
        if transfer.array in step.problem.lent - step.problem.renewed:
            timesteps = [*timesteps, *(timestep + len(executions) for timestep in timesteps)]
        assert transfer.out_after in timesteps
        assert transfer.back_before in timesteps
        assert not any(transfer.out_after < timestep < transfer.back_before for timestep in timesteps)
    sizes = [arrays[transfer.array].size_bytes for transfer in answer.transfers]
    away = away_bytes(answer.transfers, sizes, len(executions))
    assert answer.peak_bytes == max(map(int.__sub__, there, away), default=0)
    seconds = [step.problem.seconds[execution.operator] for execution in executions]
    simulation = simulate_settled(seconds, answer.transfers, sizes, link)
    assert answer.simulation == simulation
    extra = simulation.seconds - step.problem.step_seconds
    assert answer.extra_seconds == pytest.approx(extra, abs=1e-9)
    if answer.is_met:
        assert answer.bound.extra_seconds <= extra + 1e-9


def check_seeds(seeds: range, *, most_operators: int = 7, lends: bool = False) -> tuple[int, int, int]:
    """Compare with every choice; return how many budgets can be met, are, and are met as fast."""
    possible = met = fastest = 0
    for seed in seeds:
        draw = random.Random(seed)
        step = random_step(seed, most_operators)
        if lends:
            step.problem = replace(
                step.problem,
                lent=frozenset({0, 1}),
                renewed=frozenset(draw.choice(((), (), (0,), (1,)))),
            )
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
            possible += least < math.inf
            met += answer.is_met
            if answer.is_met:
                assert answer.simulation.seconds >= least - 1e-9
                fastest += answer.simulation.seconds <= least + 1e-9
    return possible, met, fastest


def test_answers_are_mostly_the_fastest_of_all_choices():
    possible, met, fastest = check_seeds(range(30))
    # What is not met needs repetitions that the search of these does not find.
    assert met >= 0.85 * possible > 10
    assert fastest >= 0.9 * met


@pytest.mark.slow
def test_hundreds_of_answers_are_valid():
    possible, met, fastest = check_seeds(range(30, 600))
    assert met >= 0.85 * possible
    assert fastest >= 0.9 * met


def test_answers_are_mostly_the_fastest_where_the_caller_lends_arrays():
    possible, met, fastest = check_seeds(range(60), most_operators=6, lends=True)
    assert met >= 0.85 * possible > 10
    assert fastest >= 0.9 * met


@pytest.mark.slow
def test_hundreds_of_answers_are_valid_where_the_caller_lends_arrays():
    possible, met, fastest = check_seeds(range(60, 400), most_operators=6, lends=True)
    assert met >= 0.85 * possible
    assert fastest >= 0.9 * met


def test_a_chain_is_swapped_without_stalls_as_far_as_the_link_carries():
    problem = chain(40)
    budget = plain_peak(problem) * 8 // 10
    # Operators take a second and make ten bytes each: every fourth array can be copied meanwhile.
    answer = least_time_with_swaps(problem, budget, Link(2.5, 2.5))
    assert answer.is_met
    assert answer.extra_seconds == answer.bound.extra_seconds == 0
    assert answer.transfers
    assert least_time(problem, budget).recomputation.extra_seconds > 0


@pytest.mark.parametrize("share", [0.7, 0.5, 0.3])
def test_swapping_beside_repetitions_takes_less_time_close_to_the_bound(share):
    problem = chain(60, (1.0, 3.0, 2.0))
    budget = int(share * plain_peak(problem))
    answer = least_time_with_swaps(problem, budget, Link(1.5, 1.5))
    alone = least_time(problem, budget)
    assert answer.is_met
    assert answer.extra_seconds < alone.recomputation.extra_seconds
    measured = measure(prepare(problem), answer.recomputation.executions)
    assert answer.recomputation == measured
    assert measured.peak_bytes > budget >= answer.peak_bytes
    assert answer.gap_seconds <= 0.06 * problem.step_seconds


def test_what_cannot_be_made_again_waits_on_the_host():
    problem = replace(chain(20), makers=tuple(() for _ in chain(20).makers))
    budget = plain_peak(problem) // 2
    assert least_time(problem, budget).bound.is_impossible
    answer = least_time_with_swaps(problem, budget, Link(2.0, 2.0))
    assert answer.is_met
    assert answer.recomputation.dropped == ()
    assert answer.simulation.stalled_seconds >= answer.bound.extra_seconds > 0


def test_a_budget_below_one_operator_is_impossible_with_any_link():
    answer = least_time_with_swaps(chain(20), 25, Link(1e9, 1e9))
    assert not answer.is_met
    assert answer.bound.is_impossible
    assert answer.gap_seconds == math.inf


@pytest.mark.parametrize("link", [Link(math.inf, math.inf), Link(1.0, math.inf), Link(math.inf, 1.0)])
def test_a_link_may_take_no_time(link):
    problem = chain(20)
    answer = least_time_with_swaps(problem, plain_peak(problem) // 2, link)
    assert answer.is_met
    assert answer.bound.extra_seconds <= answer.extra_seconds
    if link == Link(math.inf, math.inf):
        assert answer.extra_seconds == 0


def test_a_link_that_is_too_slow_changes_nothing():
    problem = chain(40)
    budget = int(0.6 * plain_peak(problem))
    answer = least_time_with_swaps(problem, budget, Link(1e-3, 1e-3))
    assert answer.transfers == ()
    assert answer.recomputation == least_time(problem, budget).recomputation


def test_the_answer_is_the_same_each_time():
    problem = chain(16, (1.0, 3.0, 2.0))
    link = Link(2.0, 3.0)
    assert least_time_with_swaps(problem, 110, link) == least_time_with_swaps(problem, 110, link)


def test_nothing_is_planned_after_the_deadline():
    answer = least_time_with_swaps(chain(40), 200, Link(1.0, 1.0), deadline=time.monotonic())
    assert answer.recomputation.dropped == ()
