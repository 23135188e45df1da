"""The game: states, transitions and rewards of sections 4.6 and 4.7 of the paper.

The player goes along the nodes in sequence. What may be done at a node is what nodes up to it stand for, has
not been done, and makes room at a moment that passes the limit. It ends when nothing passes the limit any
more, whatever comes next.

* After a copy is asked for the player stands at the first node that begins no earlier than the copy's end
  ("we always round up the agent to the next node"), after a removal at the next node. Doing nothing leads to
  the next node at which there is something new to do.
* The player never passes a node whose operator would not fit ("an extra check"), but stays in front of it and
  has to do something. If nothing is left, the game is lost.
* A reward is the change of the step's simulated time, with its sign reversed: stalls, repetitions, and what
  of both overlaps. So all of a game's rewards are what its plan adds to the step's time, negative. While the
  limit is still passed, that time is the one with the smallest limit that what has been done allows. A lost
  game costs a step's time more, and what copying all bytes beyond the limit takes; and again in proportion to
  those that are left.

Where it differs from the paper: a copy begins when the operator that accesses the array has run and the link
is free, while the paper's begins at the node where the player stands, so that the link idles until then; only
what makes room may be done; the paper goes from node to node where nothing changes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from olla_solvers.errors import OptionError
from olla_solvers.problem import Bytes, Timestep
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import RecomputationProblem, Seconds
from olla_solvers.swapping.environment.actions import NOTHING, Action, actions_of
from olla_solvers.swapping.environment.features import Features, edge_weights, node_features
from olla_solvers.swapping.environment.layout import Layout, Layouts, Numbers, removed_states
from olla_solvers.swapping.environment.operations import edges_of, operations_of
from olla_solvers.swapping.environment.plan import SwappedStep, swapped_step
from olla_solvers.swapping.environment.timetable import Timetable, least_bytes, timetable
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.transfers import Link

LEAST_SHARE = 1 / 1000
"""Arrays below this share of the peak are no nodes: they make little room."""


@dataclass(frozen=True)
class Observation:
    """What the player sees.

    Attributes:
        node: where the player stands.
        choices: the nodes that stand for what may be done, ascending.
        done: the nodes that stand for what has been done.
        is_over: True at the end of the game.
    """

    node: int
    choices: tuple[int, ...]
    done: frozenset[int]
    is_over: bool


@dataclass
class _Game:
    """What has been done, and what follows from it.

    Attributes:
        layout: the sequence that runs.
        needed: for each action the timestep at which its arrays are accessed next.
        least: the bytes of each timestep, if arrays are away as long as they can be.
        timetable: when they are copied.
        node: where the player stands.
        done: the nodes of what has been done.
        removed: of these, the ones of removals that were possible.
        copies: and those of copies, each with the position of the operator after which it was asked for.
        has_no_way_out: True if the game is lost.
    """

    layout: Layout
    needed: dict[int, Timestep]
    least: Numbers
    timetable: Timetable
    node: int = 0
    done: set[int] = field(default_factory=set)
    removed: list[int] = field(default_factory=list)
    copies: dict[int, Timestep] = field(default_factory=dict)
    has_no_way_out: bool = False


class Environment:
    """A step, a limit and a link.

    Attributes:
        problem: the step.
        limit_bytes: of planned arrays and workspaces.
        link: which copies.
        peak_bytes: of the step if nothing is done.
        operations: the nodes.
        actions: what may ever be done, by node.
        scale_seconds: of copying all bytes beyond the limit out and in, or a hundredth of the step: what a
            game is about.
    """

    def __init__(
        self,
        problem: RecomputationProblem,
        limit_bytes: Bytes,
        link: Link,
        *,
        recompute: bool = True,
        least_share: float = LEAST_SHARE,
    ) -> None:
        """Prepare the game, and begin it.

        Args:
            problem: the step, which runs in the problem's order.
            limit_bytes: of planned arrays and workspaces.
            link: which copies.
            recompute: False if arrays may be swapped alone.
            least_share: of the peak; what is smaller stays on the device.

        Raises:
            OptionError: if the limit is below 0.
            ProblemError: if the problem is none.
        """
        if limit_bytes < 0:
            raise OptionError(f"no memory is below 0: a limit of {limit_bytes} B makes no sense")
        self.problem, self.limit_bytes, self.link = problem, limit_bytes, link
        self._instance = prepare(problem)
        self._layouts = Layouts(self._instance)
        plain = self._layouts.without(())
        if plain is None:
            raise OptionError("the step cannot run at all in the order that it has")
        self._plain = plain
        self.peak_bytes = int(plain.resident_bytes.max(initial=0))
        beyond = max(0, self.peak_bytes - limit_bytes)
        self.scale_seconds = max(
            problem.step_seconds / 100, link.out_seconds(beyond) + link.in_seconds(beyond)
        )
        self.operations = operations_of(self._instance, int(least_share * self.peak_bytes) + 1)
        self._actions = actions_of(self._instance, self.operations, link, recompute=recompute)
        self.actions: dict[int, Action] = {action.node: action for action in self._actions}
        self._last_run = [operation.last_run for operation in self.operations]
        self._begin_nodes = sorted({action.from_node for action in self._actions})
        self._game = self._new_game()
        self._observation = self._observe()

    @property
    def features(self) -> Features:
        """The nodes' features at the beginning."""
        sizes = [array.size_bytes for array in self.problem.problem.arrays]
        return node_features(self.operations, self._actions, sizes, self.link)

    @property
    def edges(self) -> dict[tuple[int, int], float]:
        """The weights of the edges between nodes."""
        return edge_weights(edges_of(self.operations), self._actions)

    @property
    def observation(self) -> Observation:
        """What the player sees now."""
        return self._observation

    @property
    def least_peak_bytes(self) -> Bytes:
        """The smallest peak that what has been done allows."""
        return int(self._game.least.max(initial=0))

    @property
    def is_won(self) -> bool:
        """True if nothing passes the limit any more."""
        return self.least_peak_bytes <= self.limit_bytes

    @property
    def extra_seconds(self) -> Seconds:
        """What has been done adds so much to the step's time; if the limit is passed, see the module."""
        return self._game.timetable.seconds - self.problem.step_seconds

    def reset(self) -> Observation:
        """Begin again."""
        self._game = self._new_game()
        self._observation = self._observe()
        return self._observation

    def step(self, choice: int) -> tuple[Observation, Seconds]:
        """Do something.

        Args:
            choice: one of the nodes that the last observation offers.

        Returns:
            What the player sees next, and the reward.

        Raises:
            OptionError: if this is no such node.
        """
        if choice not in self._observation.choices:
            raise OptionError(f"node {choice} stands for nothing that may be done: {self._observation}")
        game, before = self._game, self.extra_seconds
        if choice == NOTHING:
            game.node = self._next_node(game.node)
        elif self.actions[choice].is_removal:
            self._remove(self.actions[choice])
        else:
            self._copy(self.actions[choice])
        self._observation = self._observe()
        lost = self._penalty() if game.has_no_way_out else 0.0
        return self._observation, before - self.extra_seconds - lost

    def plan(self) -> SwappedStep:
        """Return what has been done so far as a plan, by the simulator and the evaluator."""
        game = self._game
        recomputation = self._layouts.evaluator.recomputation(
            removed_states(self._instance, (self.actions[node].unit for node in game.removed))
        )
        resident = game.layout.resident_bytes.tolist()
        return swapped_step(self.problem, recomputation, resident, game.timetable.transfers, self.link)

    def _new_game(self) -> _Game:
        plain = self._plain
        table = timetable(plain.seconds, plain.resident_bytes, (), self.link, self.limit_bytes)
        return _Game(plain, self._needed(plain), plain.resident_bytes, table)

    def _needed(self, layout: Layout) -> dict[int, Timestep]:
        """Return for each action the timestep at which its arrays are accessed next."""
        return {
            action.node: min(
                self._layouts.next_access(layout, array, action.after) for array in action.arrays
            )
            for action in self._actions
        }

    def _remove(self, action: Action) -> None:
        game = self._game
        removed = [*game.removed, action.node]
        layout = self._layouts.without(self.actions[node].unit for node in removed)
        game.done.add(action.node)
        if layout is not None:
            game.removed, game.layout, game.needed = removed, layout, self._needed(layout)
            self._time()
        game.node = min(game.node + 1, self._last_node())

    def _copy(self, action: Action) -> None:
        game = self._game
        game.done.add(action.node)
        game.copies[action.node] = max(action.after, *game.copies.values(), 0)
        self._time()
        # When the copy that has just been asked for ends, by the sequence in which copies are asked for.
        end = max(game.timetable.out_ends, default=0.0)
        begins, timestep_of = game.timetable.begins, game.layout.timestep_of
        position = bisect_left(timestep_of, bisect_left(begins, end))
        node = bisect_left(self._last_run, position - 1)
        game.node = min(max(node, game.node), self._last_node())

    def _time(self) -> None:
        """Find out the step's time and the least memory after something was done."""
        game, layout = self._game, self._game.layout
        stays = []
        for node, asked in game.copies.items():
            action, after = self.actions[node], layout.timestep_of[asked]
            if game.needed[node] > after + 1:
                stays.append(Gap(after, game.needed[node], action.arrays[0], action.size_bytes))
        game.least = least_bytes(layout.resident_bytes, stays)
        game.timetable = timetable(layout.seconds, layout.resident_bytes, stays, self.link, self.limit_bytes)

    def _last_node(self) -> int:
        """Return the last node that can be reached before an operator that does not fit."""
        game = self._game
        beyond = np.flatnonzero(game.least > self.limit_bytes)
        if not len(beyond):
            return len(self.operations) - 1
        # What a repetition needs counts for the operator that it runs for.
        position = bisect_left(game.layout.timestep_of, int(beyond[0]))
        return max(game.node, bisect_left(self._last_run, position) - 1)

    def _next_node(self, node: int) -> int:
        """Return the next node at which there is something new to do, or the last one that can be reached."""
        place = bisect_right(self._begin_nodes, node)
        last = self._last_node()
        return min(self._begin_nodes[place], last) if place < len(self._begin_nodes) else last

    def _observe(self) -> Observation:
        game = self._game
        if self.is_won:
            return Observation(game.node, (), frozenset(game.done), True)
        while True:
            choices = self._choices()
            can_wait = game.node < self._last_node()
            if choices or not can_wait:
                break
            game.node = self._next_node(game.node)
        if can_wait:
            choices = [NOTHING, *choices]
        game.has_no_way_out = not choices
        return Observation(game.node, tuple(choices), frozenset(game.done), not choices)

    def _choices(self) -> list[int]:
        """Return what may be done where the player stands, and makes room where the limit is passed."""
        game, timestep_of = self._game, self._game.layout.timestep_of
        passes = np.concatenate([[0], np.cumsum(game.least > self.limit_bytes)])
        done = [self.actions[node] for node in game.done]
        removed = {array for action in done if action.is_removal for array in action.arrays}
        copied = {array for action in done if not action.is_removal for array in action.arrays}
        has_run = self._last_run[game.node]
        choices = []
        for action in self._actions:
            # "We cannot offload X after removing X, and vice versa."
            others = copied if action.is_removal else removed
            if (
                action.node in game.done
                or action.from_node > game.node
                or not others.isdisjoint(action.arrays)
            ):
                continue
            first = timestep_of[max(action.after, has_run)] + 1
            needed = game.needed[action.node]
            if needed > first and passes[needed] > passes[first]:
                choices.append(action.node)
        return choices

    def _penalty(self) -> Seconds:
        """Return what a lost game costs beside its seconds."""
        beyond = self.least_peak_bytes - self.limit_bytes
        return (self.problem.step_seconds + self.scale_seconds) * (
            1 + beyond / max(1, self.peak_bytes - self.limit_bytes)
        )
