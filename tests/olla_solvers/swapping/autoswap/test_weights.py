"""Weights by Bayesian optimisation (section IV-C)."""

from __future__ import annotations

import builtins

import pytest

from olla_solvers.errors import OptionError, SolverUnavailableError
from olla_solvers.swapping.autoswap.candidates import least_load_bytes
from olla_solvers.swapping.autoswap.planner import AutoSwap, autoswap
from olla_solvers.swapping.autoswap.scores import Score
from olla_solvers.swapping.autoswap.weights import best_weights, only
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link
from tests.olla_solvers.swapping.swapped_steps import check, network_step

LINK = Link(20.0, 20.0)


def distance(weights) -> float:
    """Least where two scores matter against each other, which no score alone shows."""
    return 0.01 + (weights[Score.AREA] - 0.6) ** 2 + (weights[Score.WEIGHTED] + 0.8) ** 2


def test_weights_are_found_that_no_score_alone_has():
    weights = best_weights(distance, seed=0)
    assert distance(weights) < 0.2 < min(distance(only(score)) for score in Score)
    assert all(-1 <= weight <= 1 for weight in weights.values())


def test_weights_follow_from_the_seed():
    first, again, other = (best_weights(distance, seed=seed, rounds=15) for seed in (3, 3, 4))
    assert first == again != other


def test_no_more_weights_are_tried_than_asked_for_and_none_after_one_that_adds_nothing():
    tried = []

    def extra_seconds(weights) -> float:
        tried.append(weights)
        return 10.0 + sum(weights.values())

    best_weights(extra_seconds, rounds=12)
    assert len(tried) == 12
    tried.clear()
    assert best_weights(extra_seconds, rounds=2) in tried
    assert len(tried) == 2
    assert best_weights(lambda weights: 0.0) == only(Score.AREA)


def test_results_that_are_all_equal_are_no_trouble(recwarn):
    assert best_weights(lambda weights: 1.0, rounds=15) == only(Score.AREA)
    assert not recwarn.list


@pytest.fixture(scope="module")
def step() -> TimedStep:
    return network_step(layers=12)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.6, 0.5])
def test_the_combination_is_no_worse_than_any_score(step, share):
    planner = AutoSwap.of(step, LINK, 1)
    limit_bytes = int(share * step.peak_bytes)
    plan = planner.tuned_plan(limit_bytes, seed=1, rounds=15)
    check(step, plan)
    assert plan.peak_bytes <= limit_bytes
    assert plan.extra_seconds <= min(planner.plan(limit_bytes, only(score)).extra_seconds for score in Score)
    assert plan == planner.tuned_plan(limit_bytes, seed=1, rounds=15)


def test_a_limit_below_what_candidates_allow_is_met_as_far_as_they_do(step):
    planner = AutoSwap.of(step, LINK, 1)
    least = least_load_bytes(step, 1)
    assert planner.plan(0, only(Score.DURATION)).peak_bytes == least
    assert planner.plan(least, only(Score.DURATION)).peak_bytes == least


def test_a_limit_below_nothing_is_an_error(step):
    with pytest.raises(OptionError, match="no load is below 0"):
        autoswap(step, -1, LINK)


def test_a_missing_optimiser_is_an_error_that_says_what_to_install(monkeypatch):
    load = builtins.__import__

    def without_optimiser(name, *arguments, **named):
        if name.startswith("bayes_opt"):
            raise ImportError("no module named 'bayes_opt'")
        return load(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_optimiser)
    with pytest.raises(SolverUnavailableError, match=r"pip install 'olla-fx\[bayes\]'"):
        best_weights(distance)
    assert best_weights(lambda weights: 0.0) == only(Score.AREA)
