"""Fitted Q-iteration with replay: algorithm 1, equations 4 and 5.

What Q shall be (y of equation 5) is by default what the game really came to from there on, and not the next
state's largest Q (``Settings.lookahead=1``). A game has some dozens of moves with as many choices each, most
of them never tried in that state; the largest of so many estimates is too large, and policies get worse as
they learn. On VGG-16 at 0.6 of its peak, swapping alone, the last sixth of 100 games took 23 % more than the
step with equation 5, 16 % at random, and 9 % by what games came to.

At first some games are played at random: they fill the memory, and cost next to nothing beside updates. Of
each later episode the share of random actions is one minus the share of the episodes, or of the time, that
has passed. Random actions are removals as often as a number says that each game draws. Weights are updated by
Adam instead of plain SGD, whose rate would have to be found for each step. Rewards are counted in the seconds
that copying all bytes beyond the limit would take, so that Q values of a small step and of a large one are of
the same size.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from olla_fx.deep_q.network import ROUNDS, WIDTH, Graph, QNetwork
from olla_solvers.errors import OptionError
from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.environment.environment import Environment, Observation


@dataclass(frozen=True)
class Settings:
    """How to learn.

    Attributes:
        episodes: l, games played from which is learned while they are played.
        random_games: played before at random, to learn from; they take little time.
        batch: games' moves that each update looks at.
        updates: after each move; a fraction for one after several moves.
        decay: gamma, what the next move's value counts.
        lookahead: the share of equation 5 in what is learned; the rest is what the game really came to.
        rate: of Adam's.
        memory: the newest moves that are kept for updates.
        width: p of a new network.
        rounds: T of a new network.
        seed: of all draws.
    """

    episodes: int = 200
    random_games: int = 100
    batch: int = 8
    updates: float = 0.5
    decay: float = 1.0
    lookahead: float = 0.0
    rate: float = 5e-3
    memory: int = 5000
    width: int = WIDTH
    rounds: int = ROUNDS
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            OptionError: if one makes no sense.
        """
        counts = self.episodes, self.batch, self.memory, self.width, self.rounds
        shares = self.decay, self.lookahead
        if (
            min(counts) < 1
            or min(self.updates, self.random_games) < 0
            or not self.rate > 0
            or not all(0 <= share <= 1 for share in shares)
        ):
            raise OptionError(f"nothing can be learned like that: {self}")


@dataclass(frozen=True)
class Learned:
    """The end of learning.

    Attributes:
        network: what has learned.
        returns: of each game, the random ones first, the sum of the rewards, in seconds.
    """

    network: QNetwork
    returns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Move:
    """One move of a game: the tuple that algorithm 1 adds to D; rewards in units of the game.

    Attributes:
        before: what the player saw.
        choice: what it did.
        reward: for it.
        after: what it saw then.
        coming: the sum of this and all later rewards of the game, decayed.
    """

    before: Observation
    choice: int
    reward: float
    after: Observation
    coming: float


def learn(
    environments: Sequence[Environment],
    settings: Settings | None = None,
    *,
    network: QNetwork | None = None,
    deadline: float = math.inf,
    game_over: Callable[[Environment], None] | None = None,
) -> Learned:
    """Play, and learn from it.

    Args:
        environments: played in turn.
        settings: how to learn.
        network: goes on learning, and is changed; a new one if there is none.
        deadline: ``time.monotonic()`` at which to stop.
        game_over: is called with the environment after each game.
    """
    settings = settings or Settings()
    network = network or QNetwork(settings.width, settings.rounds, seed=settings.seed)
    players = [
        Player(environment, network, settings, index) for index, environment in enumerate(environments)
    ]
    optimizer = torch.optim.Adam(network.parameters(), settings.rate)
    began = time.monotonic()
    returns = []
    for game in range(settings.random_games + settings.episodes):
        episode = game - settings.random_games
        passed = (time.monotonic() - began) / (deadline - began) if deadline < math.inf else 0.0
        player = players[game % len(players)]
        sure = max((episode + 1) / settings.episodes, passed) if episode >= 0 else 0.0
        reward = player.play(1 - sure, optimizer if episode >= 0 else None, deadline)
        if reward is None:
            break
        returns.append(reward)
        if game_over is not None:
            game_over(player.environment)
    return Learned(network, tuple(returns))


class Player:
    """Plays one environment.

    Attributes:
        environment: which.
    """

    def __init__(
        self, environment: Environment, network: QNetwork, settings: Settings, index: int = 0
    ) -> None:
        """Remember nothing yet.

        Args:
            environment: which is played.
            network: which chooses.
            settings: how to learn.
            index: of several players, of which each draws its own random numbers.
        """
        self.environment = environment
        self._graph = Graph.of(environment)
        self._network, self._settings = network, settings
        self._draw = random.Random(f"{settings.seed} {index}")
        self._moves: deque[_Move] = deque(maxlen=settings.memory)
        self._owed = self._liking = 0.0

    def play(
        self, randomness: float, optimizer: torch.optim.Optimizer | None = None, deadline: float = math.inf
    ) -> float | None:
        """Play one game.

        Args:
            randomness: the share of random actions.
            optimizer: of the network's weights; None to learn nothing.
            deadline: ``time.monotonic()`` at which to give up.

        Returns:
            The sum of the rewards; None if the deadline came first.
        """
        observation, scale = self.environment.reset(), self.environment.scale_seconds
        # Some games swap nearly alone, others hardly at all.
        self._liking = self._draw.random()
        moves: list[tuple[Observation, int, Seconds, Observation]] = []
        while not observation.is_over:
            if time.monotonic() > deadline:
                return None
            choice = self._choose(observation, randomness)
            following, reward = self.environment.step(choice)
            moves.append((observation, choice, reward, following))
            observation = following
            if optimizer is not None and self._moves:
                self._owed += self._settings.updates
                while self._owed >= 1:
                    self._owed -= 1
                    self._update(optimizer)
        coming = 0.0
        for before, choice, reward, after in reversed(moves):
            coming = reward / scale + self._settings.decay * coming
            self._moves.append(_Move(before, choice, reward / scale, after, coming))
        return sum(reward for _, _, reward, _ in moves)

    def _choose(self, observation: Observation, randomness: float) -> int:
        choices = observation.choices
        if self._draw.random() < randomness:
            actions = self.environment.actions
            removals = [choice for choice in choices if choice in actions and actions[choice].is_removal]
            others = [choice for choice in choices if choice not in removals]
            wants_removal = self._draw.random() < self._liking
            return self._draw.choice((removals if wants_removal else others) or choices)
        if len(choices) == 1:
            return choices[0]
        with torch.no_grad():
            (values,) = self._network(self._graph, [observation], [choices])
        return choices[int(values.argmax())]

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take one step towards y, which is a constant."""
        moves = [self._draw.choice(self._moves) for _ in range(self._settings.batch)]
        share = self._settings.lookahead
        targets = torch.tensor([move.coming for move in moves])
        if share:
            targets = (1 - share) * targets + share * self._by_equation_5(moves)
        before = [move.before for move in moves]
        values = torch.cat(self._network(self._graph, before, [[move.choice] for move in moves]))
        loss = F.mse_loss(values, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _by_equation_5(self, moves: Sequence[_Move]) -> torch.Tensor:
        targets = torch.tensor([move.reward for move in moves])
        going_on = [index for index, move in enumerate(moves) if not move.after.is_over]
        if going_on:
            following = [moves[index].after for index in going_on]
            with torch.no_grad():
                values = self._network(self._graph, following, [after.choices for after in following])
            targets[going_on] += self._settings.decay * torch.stack([value.max() for value in values])
        return targets
