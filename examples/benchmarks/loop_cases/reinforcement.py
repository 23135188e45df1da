"""Loops of reinforcement learning: calls of one state between training steps, and returns of any length."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .side import Case, Planner, Side

STATE = 4
ACTIONS = 2
REPLAYED = 128
"""Transitions in a training batch of DQN."""

REMEMBERED = 10_000
DISCOUNT = 0.99
KEPT = 0.995
"""The share of the target network's weights that an update keeps."""

LONGEST = 60
"""Steps after which an episode of REINFORCE ends."""


class Game:
    """A state that wanders as actions push it, and ends by chance."""

    def __init__(self) -> None:
        """Draw the first state."""
        self._chance = random.Random(0)
        self.reset()

    def reset(self) -> None:
        """Begin an episode."""
        self.state = torch.randn(STATE)

    def play(self, action: int) -> tuple[float, bool]:
        """Take an action; return the reward, and True if the episode is over."""
        self.state = torch.tanh(self.state * 0.9 + 0.1 * (action - 0.5) + 0.05 * torch.randn(STATE))
        return float(1 - self.state.abs().mean()), self._chance.random() < 1 / LONGEST


@dataclass(frozen=True, slots=True)
class Transition:
    """What one action led to; None as the next state if that was the last one."""

    state: torch.Tensor
    action: int
    reward: float
    after: torch.Tensor | None


def value_network() -> nn.Module:
    """Return a network of the value of each action."""
    return nn.Sequential(
        nn.Linear(STATE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, ACTIONS)
    )


class DeepQ:
    """Deep Q-learning with a replay memory and a target network that follows softly."""

    def __init__(self, plan: Planner) -> None:
        """Make the networks, and fill the memory by chance."""
        torch.manual_seed(0)
        self.policy, self.target = value_network(), value_network()
        self.target.load_state_dict(self.policy.state_dict())
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-4, amsgrad=True)
        states = torch.zeros(REPLAYED, STATE)
        self.values, self.target_values = plan(self.policy, (states,)), plan(self.target, (states,))
        self._game = Game()
        self._chance = random.Random(0)
        self._memory: list[Transition] = []
        while len(self._memory) < REPLAYED:
            self._play(self._chance.randrange(ACTIONS))

    def _play(self, action: int) -> None:
        state = self._game.state
        reward, is_over = self._game.play(action)
        self._memory.append(Transition(state, action, reward, None if is_over else self._game.state))
        del self._memory[:-REMEMBERED]
        if is_over:
            self._game.reset()

    def run(self, index: int) -> torch.Tensor:
        """Act, learn from the memory, and let the target follow; return the loss."""
        if self._chance.random() < max(0.05, 0.9 - index / 200):
            action = self._chance.randrange(ACTIONS)
        else:
            with torch.no_grad():
                action = int(self.values(self._game.state[None]).argmax(1))
        self._play(action)
        loss = self._loss(self._chance.sample(self._memory, REPLAYED))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_value_(self.policy.parameters(), 100)
        self.optimizer.step()
        followed, weights = self.target.state_dict(), self.policy.state_dict()
        for name in weights:
            followed[name] = weights[name] * (1 - KEPT) + followed[name] * KEPT
        self.target.load_state_dict(followed)
        return loss.detach()

    def _loss(self, batch: list[Transition]) -> torch.Tensor:
        states = torch.stack([one.state for one in batch])
        actions = torch.tensor([one.action for one in batch])[:, None]
        rewards = torch.tensor([one.reward for one in batch])
        goes_on = torch.tensor([one.after is not None for one in batch])
        after = torch.stack([one.after for one in batch if one.after is not None])
        values = self.values(states).gather(1, actions)
        later = torch.zeros(REPLAYED)
        with torch.no_grad():
            later[goes_on] = self.target_values(after).max(1).values
        return F.smooth_l1_loss(values, (later * DISCOUNT + rewards)[:, None])


class Reinforce:
    """Policy gradients: all forwards of an episode wait for one backward, as in PyTorch's example."""

    def __init__(self, plan: Planner) -> None:
        """Make the network."""
        torch.manual_seed(0)
        self.policy = nn.Sequential(
            nn.Linear(STATE, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, ACTIONS)
        )
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.scores = plan(self.policy, (torch.zeros(1, STATE),))
        self._game = Game()

    def run(self, index: int) -> torch.Tensor:
        """Play an episode and learn from it; return the loss."""
        self._game.reset()
        logarithms, rewards = [], []
        for _ in range(LONGEST):
            chances = torch.distributions.Categorical(F.softmax(self.scores(self._game.state[None]), 1))
            action = chances.sample()  # type: ignore[no-untyped-call]
            logarithms.append(chances.log_prob(action))  # type: ignore[no-untyped-call]
            reward, is_over = self._game.play(int(action))
            rewards.append(reward)
            if is_over:
                break
        total, totals = 0.0, []
        for reward in reversed(rewards):
            total = reward + DISCOUNT * total
            totals.insert(0, total)
        returns = torch.tensor(totals)
        returns = (returns - returns.mean()) / (returns.std(unbiased=False) + 1e-6)
        loss = torch.cat([-one * gain for one, gain in zip(logarithms, returns, strict=True)]).sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


def deep_q(plan: Planner, steps: int) -> Side:
    """Make a loop of DQN; see :data:`Case`."""
    agent = DeepQ(plan)
    return Side(agent.run, [agent.policy, agent.target])


def reinforce(plan: Planner, steps: int) -> Side:
    """Make a loop of REINFORCE; see :data:`Case`."""
    agent = Reinforce(plan)
    return Side(agent.run, [agent.policy])


OWN_LOOPS: dict[str, Case] = {"DQN": deep_q, "REINFORCE": reinforce}
"""Loops whose training is no one call of a model and a loss."""
