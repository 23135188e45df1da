"""The network: states of nodes (equation 1), of the graph (equation 2), and Q values (equation 3).

All states of a batch are computed at once: they differ in which actions are valid, and the graph's edges are
the same. Two sums are written differently, which changes nothing of the first and the scale of the second:

* ReLU(W4 w) summed over edges is ReLU(W4) times the sum of the weights, since no weight is negative.
* The graph's state holds the mean of the nodes' states, not their sum, so that a network which has learned on
  a small graph sees values of the same size on a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from olla_solvers.swapping.environment.environment import Environment, Observation
from olla_solvers.swapping.environment.features import FEATURES, VALID

WIDTH = 16
"""p, the length of a node's state."""

ROUNDS = 4
"""T, how often nodes read their neighbours' states."""


@dataclass(frozen=True)
class Graph:
    """What stays the same of an environment.

    Attributes:
        features: of each node.
        neighbours: a sparse matrix that sums up a node and its neighbours.
        lags: for each node the sum of its edges' weights.
    """

    features: torch.Tensor
    neighbours: torch.Tensor
    lags: torch.Tensor

    @classmethod
    def of(cls, environment: Environment) -> Graph:
        """Return an environment's graph."""
        features = torch.from_numpy(environment.features)
        count = len(features)
        edges = environment.edges
        ends = torch.tensor(list(edges), dtype=torch.long).reshape(-1, 2)
        weights = torch.tensor(list(edges.values()), dtype=torch.float32)
        lags = torch.zeros(count)
        lags.index_add_(0, ends.flatten(), weights.repeat_interleave(2))
        loops = torch.arange(count)
        rows = torch.cat([ends[:, 0], ends[:, 1], loops])
        columns = torch.cat([ends[:, 1], ends[:, 0], loops])
        matrix = torch.sparse_coo_tensor(
            torch.stack([rows, columns]), torch.ones(len(rows)), (count, count), check_invariants=False
        )
        return cls(features, matrix.coalesce(), lags)

    def validity(self, observations: Sequence[Observation]) -> torch.Tensor:
        """Return the feature that changes, a row for each node and a column for each observation."""
        validity = torch.zeros(len(self.features), len(observations))
        for column, observation in enumerate(observations):
            validity[list(observation.choices), column] = 1.0
            validity[list(observation.done), column] = -1.0
        return validity


class QNetwork(nn.Module):
    """Estimates what doing something is worth.

    Attributes:
        width: p.
        rounds: T.
    """

    def __init__(self, width: int = WIDTH, rounds: int = ROUNDS, *, seed: int = 0) -> None:
        """Draw the weights.

        Args:
            width: p.
            rounds: T.
            seed: of the draws.
        """
        super().__init__()
        self.width, self.rounds = width, rounds
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            bound = scale * columns**-0.5
            return nn.Parameter(torch.empty(rows, columns).uniform_(-bound, bound, generator=generator))

        self.w1, self.w4 = drawn(width, FEATURES), drawn(width, 1)
        # Nodes have some ten neighbours: the sums of their states begin about as large as one state.
        self.w2, self.w3 = drawn(width, width, 0.1), drawn(width, width, 0.1)
        self.w5, self.w6, self.w8 = (drawn(width, width) for _ in range(3))
        self.w7 = drawn(1, 3 * width)

    def node_states(self, graph: Graph, validity: torch.Tensor) -> torch.Tensor:
        """Return the states of all nodes: node, observation, number."""
        count, batch = validity.shape
        fixed = graph.features @ self.w1.T + graph.lags[:, None] * (self.w3 @ self.w4.relu())[:, 0]
        own = fixed[:, None, :] + validity[:, :, None] * self.w1[:, VALID]
        states = own.relu()
        for _ in range(self.rounds - 1):
            sums = torch.sparse.mm(graph.neighbours, states.reshape(count, -1))
            states = (own + sums.reshape(count, batch, -1) @ self.w2.T).relu()
        return states

    def forward(
        self, graph: Graph, observations: Sequence[Observation], choices: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Return the Q values of choices.

        Args:
            graph: of the environment that was observed.
            observations: of it.
            choices: for each observation the nodes that are asked about.
        """
        states = self.node_states(graph, graph.validity(observations))
        batch = torch.arange(len(observations))
        here = states[torch.tensor([observation.node for observation in observations]), batch]
        whole = torch.cat([states.mean(0) @ self.w5.T, here @ self.w6.T], 1)
        counts = [len(asked_about) for asked_about in choices]
        asked = batch.repeat_interleave(torch.tensor(counts))
        nodes = torch.tensor([node for asked_about in choices for node in asked_about], dtype=torch.long)
        joined = torch.cat([whole[asked], states[nodes, asked] @ self.w8.T], 1)
        return list((joined.relu() @ self.w7[0]).split(counts))  # type: ignore[no-untyped-call]
