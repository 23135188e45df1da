"""Learns on a step within a time limit, and returns the best plan that any game ended with."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from olla_fx.deep_q.learning import Player, Settings, learn
from olla_fx.deep_q.network import QNetwork
from olla_solvers.errors import OptionError
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.problem import RecomputationProblem, Seconds
from olla_solvers.swapping.environment.environment import Environment
from olla_solvers.swapping.environment.plan import SwappedStep
from olla_solvers.swapping.transfers import Link


@dataclass(frozen=True)
class LearnedPlan:
    """What learning came to.

    Attributes:
        plan: the fastest within the limit; if no game was won, the one of the smallest peak.
        is_met: True if the plan is within the limit.
        network: which has learned; None if nothing had to be done.
        returns: of each game the sum of the rewards, in seconds; the last one is without random actions.
        seconds: by the clock.
    """

    plan: SwappedStep
    is_met: bool
    network: QNetwork | None
    returns: tuple[Seconds, ...]
    seconds: float


def plan_by_learning(
    problem: RecomputationProblem,
    limit_bytes: Bytes,
    link: Link,
    *,
    recompute: bool = True,
    settings: Settings | None = None,
    network: QNetwork | None = None,
    time_limit: float | None = None,
) -> LearnedPlan:
    """Plan a step in its order by deep Q-learning.

    Args:
        problem: the step.
        limit_bytes: of planned arrays and workspaces.
        link: which copies.
        recompute: False to swap alone.
        settings: how to learn; without updates, random games and all but one episode, a network that has
            learned elsewhere is used as it is.
        network: which has learned before, on any step; it goes on learning on this one, and is changed.
        time_limit: seconds by the clock, after which the best plan so far is returned; at least one game is
            played. Without a limit, plans are the same for the same seed.

    Raises:
        OptionError: if the limit of bytes or seconds makes no sense.
    """
    if time_limit is not None and not time_limit > 0:
        raise OptionError(f"a plan takes some time: time_limit={time_limit}")
    began = time.monotonic()
    deadline = math.inf if time_limit is None else began + time_limit
    settings = settings or Settings()
    environment = Environment(problem, limit_bytes, link, recompute=recompute)
    if environment.is_won:
        return LearnedPlan(environment.plan(), True, network, (), time.monotonic() - began)
    best = _Best()
    learned = learn([environment], settings, network=network, deadline=deadline, game_over=best.see)
    returns = list(learned.returns)
    last = Player(environment, learned.network, settings).play(
        0.0, deadline=deadline if returns else math.inf
    )
    if last is not None:
        returns.append(last)
        best.see(environment)
    plan = best.plan(environment)
    return LearnedPlan(
        plan, plan.peak_bytes <= limit_bytes, learned.network, tuple(returns), time.monotonic() - began
    )


class _Best:
    """The best plan of all games: of those that were won the fastest, else the one of the smallest peak."""

    def __init__(self) -> None:
        self._plan: SwappedStep | None = None
        self._value: tuple[bool, float] = (True, math.inf)

    def see(self, environment: Environment) -> None:
        """Take the plan that a game has ended with, if it is better."""
        is_lost = not environment.is_won
        value = is_lost, float(environment.least_peak_bytes) if is_lost else environment.extra_seconds
        if self._plan is None or value < self._value:
            self._plan, self._value = environment.plan(), value

    def plan(self, environment: Environment) -> SwappedStep:
        """Return it; if no game has ended, what the one that goes on has come to."""
        return self._plan or environment.plan()
