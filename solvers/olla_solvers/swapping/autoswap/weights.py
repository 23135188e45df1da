"""Finds weights of the four scores by Bayesian optimisation (AutoSwap, section IV-C, equation 3).

A Gaussian process models the seconds that swapping by the weighted sum of scores adds to a step. Each score
alone comes first, so that the result is no worse than the best of them; then come random weights, and then
those that promise most by the upper confidence bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.autoswap.scores import Score

if TYPE_CHECKING:
    from bayes_opt import BayesianOptimization

Weights: TypeAlias = Mapping[Score, float]
"""A number from -1 to 1 for each score."""

INSTALL = "pip install 'olla-fx[bayes]'"
"""The command that installs the optimiser."""

ROUNDS = 30
"""So many weights are tried; the paper's become stable after 30 to 40."""

CLIMBS = 2
"""From so many points the most promising weights are searched for."""

RANDOM_ROUNDS = 6
"""So many of them are random."""


def only(score: Score) -> Weights:
    """Return the weights of one score alone."""
    return {other: float(other is score) for other in Score}


def best_weights(
    extra_seconds: Callable[[Weights], Seconds], *, seed: int = 0, rounds: int = ROUNDS
) -> Weights:
    """Return the weights that add the fewest seconds; of equal ones, those that were tried first.

    Args:
        extra_seconds: what swapping by some weights adds to the step.
        seed: of random weights, and of the search for promising ones.
        rounds: so many weights are tried; fewer if some add nothing.

    Raises:
        SolverUnavailableError: if the optimiser is not installed, and no score alone adds nothing.
    """
    tried: dict[tuple[float, ...], Seconds] = {}

    def try_out(weights: Weights) -> Seconds:
        key = tuple(weights[score] for score in Score)
        tried[key] = extra_seconds(weights)
        return tried[key]

    for score in list(Score)[:rounds]:
        if try_out(only(score)) <= 0:
            return only(score)
    if len(tried) < rounds:
        _optimise(try_out, tried, seed, rounds)
    best = min(tried, key=lambda key: tried[key])
    return dict(zip(Score, best, strict=True))


def _optimise(
    try_out: Callable[[Weights], Seconds],
    tried: Mapping[tuple[float, ...], Seconds],
    seed: int,
    rounds: int,
) -> None:
    """Try more weights."""
    random = np.random.default_rng(seed)
    optimiser = _optimiser(seed)
    for key, seconds in tried.items():
        optimiser.register(params=_parameters(dict(zip(Score, key, strict=True))), target=-seconds)
    for number in range(rounds - len(tried)):
        weights: Weights = dict(zip(Score, random.uniform(-1, 1, len(Score)).tolist(), strict=True))
        if number >= RANDOM_ROUNDS:
            promising = _promising(optimiser)
            # At a corner it may be what was tried before, and the random weights serve.
            if tuple(promising[score] for score in Score) not in tried:
                weights = promising
        seconds = try_out(weights)
        optimiser.register(params=_parameters(weights), target=-seconds)
        if seconds <= 0:
            return


def _parameters(weights: Weights) -> dict[str, float]:
    return {score.value: weight for score, weight in weights.items()}


def _promising(optimiser: BayesianOptimization) -> Weights:
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    # More threads take longer for matrices of a few rows, and may round otherwise.
    with threadpool_limits(1), warnings.catch_warnings():
        # Many weights select the same arrays, and no length scale explains equal results best.
        warnings.simplefilter("ignore", ConvergenceWarning)
        suggested: Mapping[str, Any] = optimiser.suggest()
    return {score: float(suggested[score]) for score in Score}


def _optimiser(seed: int) -> BayesianOptimization:
    try:
        from bayes_opt import BayesianOptimization
        from bayes_opt.acquisition import UpperConfidenceBound
    except ImportError as error:
        raise SolverUnavailableError(
            "to combine AutoSwap's scores, the package bayesian-optimization is needed, which cannot be "
            f"imported ({error}): {INSTALL}, or choose a single score"
        ) from error

    class QuickBound(UpperConfidenceBound):  # type: ignore[misc]
        """The bound, followed uphill from few points: ten, as usual, take most of the time of planning."""

        def suggest(self, *arguments: Any, **named: Any) -> Any:
            return super().suggest(*arguments, **{"n_smart": CLIMBS, **named})

    bounds = {score.value: (-1.0, 1.0) for score in Score}
    return BayesianOptimization(None, bounds, QuickBound(), random_state=seed, verbose=0)
