"""The smallest peak within so many seconds of repetitions: what nearly free recomputation can save.

It begins from the best corner of the curve of minimum cuts within the seconds
(:mod:`olla_solvers.recomputation.cuts`), and from the step without repetitions. Budgets below are met
greedily (:mod:`olla_solvers.recomputation.greedy`); what turns out not to be needed is kept again, and where
a budget is not met, it is bisected. The effort is counted in walks, so that the answer does not depend on
the machine's speed.
"""

from __future__ import annotations

import math

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.recomputation.cuts import Cuts, choice_of_units
from olla_solvers.recomputation.evaluate import Evaluator, plain_states, states_of
from olla_solvers.recomputation.greedy import Greedy, prune
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.pool import Evaluated, Pool
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem, Seconds

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
    problem: RecomputationProblem, most_extra_seconds: Seconds, *, deadline: float = math.inf
) -> Recomputation:
    """Return a sequence whose peak is as small as repetitions of so many seconds make it.

    Args:
        problem: the step.
        most_extra_seconds: of all repetitions together.
        deadline: ``time.monotonic()`` at which to stop with what there is.

    Returns:
        A sequence whose peak is not above that of the order without repetitions.

    Raises:
        ProblemError: if order, seconds or makers do not fit the problem.
    """
    instance = prepare(problem)
    evaluator, pool = Evaluator(instance, deadline), Pool()
    states = plain_states(instance)
    plain = Evaluated(states, evaluator.evaluate(states))
    pool.add(plain)
    most_walks = max(LEAST_WALKS, MOST_STEPS // max(1, len(problem.order)))
    try:
        for corner in Cuts(choice_of_units(instance), deadline).within(most_extra_seconds):
            states = states_of(instance, corner.repeated, plain.states)
            pool.add(Evaluated(states, evaluator.evaluate(states)))
        for start in (pool.lowest_within(most_extra_seconds), plain):
            _lower(evaluator, pool, start, most_extra_seconds, most_walks)
    except DeadlinePassedError:
        pass  # The best so far is an answer.
    return evaluator.recomputation(pool.lowest_within(most_extra_seconds).states)


def _lower(evaluator: Evaluator, pool: Pool, best: Evaluated, most_seconds: Seconds, most_walks: int) -> None:
    """Meet smaller and smaller budgets, and bisect where one is not met."""
    greedy = Greedy(evaluator)
    low, high, step = 0, best.peak_bytes, FIRST_STEP
    close = max(1, CLOSE * high)
    while high - low > close and evaluator.walks < most_walks:
        budget = max((low + high) // 2, int((1 - step) * high))
        left = most_walks - evaluator.walks
        evaluated = greedy.meet(best, budget, OVERSHOOT * most_seconds, left)
        if evaluated.peak_bytes <= budget:
            evaluated = prune(evaluator, evaluated, budget, left)
        pool.add(evaluated)
        if evaluated.peak_bytes <= budget and evaluated.extra_seconds <= most_seconds:
            best, high, step = evaluated, evaluated.peak_bytes, 2 * step
        else:
            low = budget
