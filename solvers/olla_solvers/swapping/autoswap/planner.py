"""Plans a step by AutoSwap: candidates, scores, selection, schedule (section IV)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from olla_solvers.problem import Bytes
from olla_solvers.swapping.autoswap.candidates import candidates
from olla_solvers.swapping.autoswap.schedule import schedule
from olla_solvers.swapping.autoswap.scores import Score, Values, all_scores, standardised
from olla_solvers.swapping.autoswap.selection import select
from olla_solvers.swapping.autoswap.weights import ROUNDS, Weights, best_weights, only
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.plan import LEAST_BYTES, SwapPlan, check_limit, plan_of
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link


@dataclass(frozen=True)
class AutoSwap:
    """A step's candidates and their scores, to plan it within several limits.

    Attributes:
        step: to plan.
        link: which copies.
        gaps: of the candidates.
        scores: the candidates' values by each score, standardised.
    """

    step: TimedStep
    link: Link
    gaps: tuple[Gap, ...]
    scores: Mapping[Score, Values]

    @classmethod
    def of(cls, step: TimedStep, link: Link, least_bytes: Bytes = LEAST_BYTES) -> AutoSwap:
        """Find a step's candidates and score them.

        Args:
            step: to plan.
            link: which copies.
            least_bytes: smaller arrays stay.
        """
        gaps = candidates(step, least_bytes)
        scores = all_scores(step, gaps, link)
        return cls(step, link, gaps, {score: standardised(values) for score, values in scores.items()})

    def plan(self, limit_bytes: Bytes, weights: Weights) -> SwapPlan:
        """Plan by weighted scores.

        Args:
            limit_bytes: of the load.
            weights: of the scores (equation 3).

        Returns:
            A plan within the limit; if that is below load_min, one of that peak.
        """
        check_limit(limit_bytes)
        priorities = sum((weights[score] * self.scores[score] for score in Score), np.zeros(len(self.gaps)))
        gaps = select(self.step, self.gaps, priorities.tolist(), limit_bytes)
        transfers = schedule(self.step, gaps, limit_bytes, self.link)
        return plan_of(self.step, transfers, self.link)

    def tuned_plan(self, limit_bytes: Bytes, *, seed: int = 0, rounds: int = ROUNDS) -> SwapPlan:
        """Plan by the weights that add the fewest seconds.

        Args:
            limit_bytes: of the load.
            seed: of the search for weights.
            rounds: so many weights are tried at most.

        Returns:
            A plan within the limit; if that is below load_min, one of that peak.

        Raises:
            SolverUnavailableError: if the optimiser is not installed, and no score alone adds nothing.
        """
        weights = best_weights(
            lambda weights: self.plan(limit_bytes, weights).extra_seconds, seed=seed, rounds=rounds
        )
        return self.plan(limit_bytes, weights)


def by_score(step: TimedStep, limit_bytes: Bytes, link: Link, score: Score) -> SwapPlan:
    """Plan a step by one score.

    Args:
        step: any.
        limit_bytes: of the load.
        link: which copies.
        score: by which candidates are selected.

    Returns:
        A plan within the limit; if that is below load_min, one of that peak.
    """
    return AutoSwap.of(step, link).plan(limit_bytes, only(score))


def autoswap(step: TimedStep, limit_bytes: Bytes, link: Link, *, seed: int = 0) -> SwapPlan:
    """Plan a step by the combination of all scores.

    Args:
        step: any.
        limit_bytes: of the load.
        link: which copies.
        seed: of the search for weights.

    Returns:
        A plan within the limit; if that is below load_min, one of that peak.

    Raises:
        SolverUnavailableError: if the optimiser is not installed, and no score alone adds nothing.
    """
    return AutoSwap.of(step, link).tuned_plan(limit_bytes, seed=seed)
