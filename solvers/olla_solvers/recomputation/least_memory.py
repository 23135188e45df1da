"""The smallest peak within so many seconds of repetitions: what nearly free recomputation can save.

Budgets below the plain peak are bisected. Each is met greedily (:mod:`olla_solvers.recomputation.greedy`),
beginning with the best states so far; what turns out not to be needed is kept again. The effort is counted in
walks, so that the answer does not depend on the machine's speed.
"""

from __future__ import annotations

import time

from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.greedy import Found, Greedy, prune
from olla_solvers.recomputation.instance import prepare
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
    evaluator = Evaluator(prepare(problem))
    states = plain_states(evaluator.instance)
    best = Found(states, evaluator.evaluate(states))
    plain_bytes = best.evaluation.peak_bytes
    greedy = Greedy(evaluator)
    walks = max(LEAST_WALKS, MOST_STEPS // max(1, len(problem.order)))
    low, high, step = 0, plain_bytes, FIRST_STEP
    while high - low > max(1, CLOSE * plain_bytes) and evaluator.walks < walks:
        if deadline is not None and time.monotonic() > deadline:
            break
        budget = max((low + high) // 2, int((1 - step) * high))
        left = walks - evaluator.walks
        found = greedy.meet(best, budget, OVERSHOOT * most_extra_seconds, left)
        if found.evaluation.peak_bytes <= budget:
            found = prune(evaluator, found, budget, left)
        if found.evaluation.peak_bytes <= budget and found.evaluation.extra_seconds <= most_extra_seconds:
            best, high, step = found, found.evaluation.peak_bytes, 2 * step
        else:
            low = budget
    return evaluator.recomputation(best.states)
