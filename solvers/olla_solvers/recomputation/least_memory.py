"""The smallest peak within so many seconds of repetitions: what nearly free recomputation can save.

It begins from the best corner of the curve of minimum cuts within the seconds
(:mod:`olla_solvers.recomputation.cuts`), and from the step without repetitions. Budgets below are met
greedily (:mod:`olla_solvers.recomputation.greedy`); what turns out not to be needed is kept again, and where
a budget is not met, it is bisected. The effort is counted in walks, so that the answer does not depend on
the machine's speed.
"""

from __future__ import annotations

import math

from olla_solvers.effort.deadline import DeadlinePassedError, check_time
from olla_solvers.recomputation.cuts import Cut, Cuts, choice_of_units
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.greedy import Greedy, prune
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.pool import Found
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds
from olla_solvers.recomputation.walk import ONCE

CLOSE = 0.002
"""Budgets are bisected until the share of the plain peak between them is smaller."""

FIRST_STEP = 0.05
"""The share of the peak that is to go first; doubled as long as that is reached."""

MOST_STEPS = 400_000
"""Operators that all walks together may pass: some 0.3 s of processor time."""

LEAST_WALKS = 60
"""Walks that are made on steps of any length."""

OVERSHOOT = 1.3
"""A budget is met in up to so many times the seconds, since some are saved afterwards."""


def least_memory(
    problem: RecomputationProblem, most_extra_seconds: Seconds, *, deadline: float | None = None
) -> Recomputation:
    """Return a sequence whose peak is as small as repetitions of so many seconds make it.

    Args:
        problem: the step.
        most_extra_seconds: of all repetitions together.
        deadline: ``time.monotonic()`` at which to stop with what there is; None for no limit.

    Returns:
        A sequence whose peak is not above that of the order without repetitions.

    Raises:
        ProblemError: if order, seconds or makers do not fit the problem.
    """
    instance = prepare(problem)
    evaluator = Evaluator(instance)
    limit = math.inf if deadline is None else deadline
    plain = plain_states(instance)
    best = first = Found(plain, evaluator.evaluate(plain))
    most_walks = max(LEAST_WALKS, MOST_STEPS // max(1, len(problem.order)))
    try:
        check_time(limit)
        for corner in Cuts(choice_of_units(instance), limit).within(most_extra_seconds):
            best = _better(best, _found(evaluator, corner), most_extra_seconds)
        for start in (best, first):
            lowered = _lowered(evaluator, start, most_extra_seconds, most_walks, limit)
            best = _better(best, lowered, most_extra_seconds)
    except DeadlinePassedError:
        pass  # The best so far is an answer.
    return evaluator.recomputation(best.states)


def _found(evaluator: Evaluator, corner: Cut) -> Found:
    states = plain_states(evaluator.instance)
    for unit in corner.repeated:
        states[unit] = ONCE
    return Found(states, evaluator.evaluate(states))


def _better(found: Found, other: Found, most_seconds: Seconds) -> Found:
    is_fine = other.evaluation.is_valid and other.evaluation.extra_seconds <= most_seconds
    return other if is_fine and other.evaluation.peak_bytes < found.evaluation.peak_bytes else found


def _lowered(
    evaluator: Evaluator, best: Found, most_seconds: Seconds, most_walks: int, deadline: float
) -> Found:
    """Meet smaller and smaller budgets, and bisect where one is not met."""
    greedy = Greedy(evaluator)
    low, high, step = 0, best.evaluation.peak_bytes, FIRST_STEP
    close = max(1, CLOSE * high)
    while high - low > close and evaluator.walks < most_walks:
        check_time(deadline)
        budget = max((low + high) // 2, int((1 - step) * high))
        left = most_walks - evaluator.walks
        found = greedy.meet(best, budget, OVERSHOOT * most_seconds, left)
        if found.evaluation.peak_bytes <= budget:
            found = prune(evaluator, found, budget, left)
        if found.evaluation.peak_bytes <= budget and found.evaluation.extra_seconds <= most_seconds:
            best, high, step = found, found.evaluation.peak_bytes, 2 * step
        else:
            low = budget
    return best
