import math
import random
from dataclasses import replace

import pytest

from olla_solvers.ilp import backends
from olla_solvers.swapping.least_time import least_time_with_swaps
from olla_solvers.swapping.referee import solve_with_fetches
from olla_solvers.swapping.transfers import Link, check
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import random_step
from tests.olla_solvers.swapping.exhaustive import least_seconds
from tests.olla_solvers.swapping.test_least_time import plain_peak


def check_seeds(solver: str, seeds: range) -> int:
    """Compare the program's plans with every choice and with the planner's; return how many there were."""
    checked = 0
    for seed in seeds:
        draw = random.Random(seed)
        step = random_step(seed, 6)
        problem = step.problem
        link = Link(draw.choice((1.0, 3.0)), draw.choice((1.0, 6.0)), draw.choice((0.0, 0.5)))
        budget = plain_peak(problem) - 1
        least = least_seconds(step, budget, link)
        if least is None or least == math.inf:
            continue
        report = solve_with_fetches(problem, budget, link, solver=solver, time_limit=30)
        assert report.outcome is backends.Outcome.OPTIMAL
        plan, recomputation = report.swapped, report.recomputation
        check_answer(step, recomputation)
        check(plan.transfers, len(recomputation.executions))
        assert plan.peak_bytes <= budget
        extra = plan.seconds - problem.step_seconds
        assert report.bound_seconds == pytest.approx(extra, abs=1e-3)
        # It may swap what is made again, too.
        assert extra <= least - problem.step_seconds + 1e-3 or not report.is_complete
        answer = least_time_with_swaps(problem, budget, link)
        assert answer.bound.extra_seconds <= extra + 1e-6
        if answer.is_met and report.is_complete:
            assert report.bound_seconds <= answer.extra_seconds + 1e-6
        checked += 1
    return checked


@pytest.mark.skipif(not backends.is_installed("highs"), reason="needs HiGHS")
def test_the_program_finds_what_every_choice_contains():
    assert check_seeds("highs", range(40)) > 5


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_the_program_finds_what_every_choice_contains_in_hundreds_of_steps(solver):
    if not backends.is_installed(solver):
        pytest.skip(f"needs {solver}")
    assert check_seeds(solver, range(40, 400)) > 50


@pytest.mark.skipif(not backends.is_installed("highs"), reason="needs HiGHS")
def test_what_is_lent_stays_on_the_device_in_the_program():
    problem, link = random_step(11, 6).problem, Link(3.0, 6.0)
    lending = replace(problem, lent=frozenset({0, 1}))
    assert lending.lent_bytes
    budget = plain_peak(problem) - 1
    kept = solve_with_fetches(problem, budget, link, solver="highs")
    report = solve_with_fetches(lending, budget + lending.lent_bytes, link, solver="highs")
    assert kept.outcome is report.outcome is backends.Outcome.OPTIMAL
    assert report.bound_seconds == pytest.approx(kept.bound_seconds)
    assert report.swapped.peak_bytes <= budget + lending.lent_bytes


@pytest.mark.skipif(not backends.is_installed("highs"), reason="needs HiGHS")
def test_a_program_that_is_too_large_is_not_stated(monkeypatch):
    monkeypatch.setattr("olla_solvers.recomputation.published.retention_program.MOST_SLOTS", 3)
    report = solve_with_fetches(random_step(0).problem, 100, Link(1.0, 1.0), solver="highs")
    assert report.outcome is backends.Outcome.TOO_LARGE
    assert report.swapped is None
