"""What may be done to a step's arrays: each action, and the node that stands for it.

The nodes that stand for an action, which the paper leaves to "a heuristic method", are:

* doing nothing: the first one of all, which is no operation on an array;
* copying an array to the host for a while: the access (read or write) after which it waits for the next one;
* removing what one run of some operators makes again: the request for its largest array.

So no node stands for two actions. An array may wait between two accesses of the phase that makes it (a
U-Net's skip connection), and from the last of these to the first one of a later phase (what forward keeps for
backward).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from olla_solvers.problem import ArrayKind, Bytes, Timestep
from olla_solvers.recomputation.evaluate import Evaluator, plain_states, states_of
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.problem import ArrayIndex, Seconds
from olla_solvers.recomputation.units import Unit
from olla_solvers.recomputation.walk import KEPT
from olla_solvers.swapping.environment.operations import Operation, OperationKind
from olla_solvers.swapping.transfers import Link

NOTHING = 0
"""The node that stands for doing nothing."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something that may be done once.

    Attributes:
        node: which stands for it.
        from_node: the first node at which it may be done.
        arrays: which are copied or removed.
        unit: which is removed; -1 for a copy.
        after: the position of the operator after whose access the arrays wait, for what is copied, or after
            which they are removed.
        size_bytes: of the arrays.
        copy_seconds: of copying out and in again; 0 of a removal.
        again_seconds: of making it again once, from what is there; 0 of a copy.
    """

    node: int
    from_node: int
    arrays: tuple[ArrayIndex, ...]
    unit: Unit
    after: Timestep
    size_bytes: Bytes
    copy_seconds: Seconds
    again_seconds: Seconds

    @property
    def is_removal(self) -> bool:
        """True if arrays are removed, False if one is copied out."""
        return self.unit >= 0


def actions_of(
    instance: Instance, operations: Sequence[Operation], link: Link, *, recompute: bool
) -> tuple[Action, ...]:
    """Return all actions of a step, by their nodes.

    Args:
        instance: the step.
        operations: of its arrays.
        link: which copies.
        recompute: True to have removals among them.
    """
    nodes = {
        (operation.kind, operation.array, operation.position): node
        for node, operation in enumerate(operations)
    }
    actions = [*_copies(instance, operations, nodes, link)]
    if recompute:
        actions += _removals(instance, operations, nodes)
    return tuple(sorted(actions, key=lambda action: action.node))


_Nodes = dict[tuple[OperationKind, ArrayIndex, Timestep], int]


def _copies(
    instance: Instance, operations: Sequence[Operation], nodes: _Nodes, link: Link
) -> Iterator[Action]:
    position = {operator: place for place, operator in enumerate(instance.problem.order)}
    phases = instance.problem.phases
    for index in {operation.array for operation in operations[1:]}:
        array = instance.problem.problem.arrays[index]
        if array.producer is None:
            continue
        phase, made = phases[array.producer], position[array.producer]
        early = sorted({position[user] for user in array.consumers if phases[user] == phase} | {made})
        late = [position[user] for user in array.consumers if phases[user] != phase]
        later = [place for place in late if place > early[-1]]
        for after, following in pairwise([*early, *([min(later)] if later else [])]):
            # In this sequence of execution or a longer one, something must run in between.
            if following > after + 1 and not any(after < place < following for place in late):
                kind = OperationKind.WRITE if after == made else OperationKind.READ
                node, size = nodes[kind, index, after], array.size_bytes
                seconds = link.out_seconds(size) + link.in_seconds(size)
                yield Action(node, node, (index,), -1, after, size, seconds, 0.0)


def _removals(instance: Instance, operations: Sequence[Operation], nodes: _Nodes) -> Iterator[Action]:
    """Yield the removals of what is kept for a later phase and can be made again if all else is kept."""
    evaluator = Evaluator(instance)
    plain = plain_states(instance)
    before = evaluator.evaluate(plain).extra_seconds
    position = {operator: place for place, operator in enumerate(instance.problem.order)}
    arrays, phases = instance.problem.problem.arrays, instance.problem.phases
    known = {operation.array for operation in operations[1:]}
    positions = [operation.position for operation in operations]
    for unit, members in enumerate(instance.units.arrays):
        shown = [index for index in members if index in known]
        if plain[unit] != KEPT or not shown:
            continue
        evaluation = evaluator.evaluate(states_of(instance, [unit], plain))
        if not evaluation.is_valid:
            continue
        phase = instance.phase_of(unit)
        last = {
            index: max(
                position[user]
                for user in (*instance.units.operators[unit], *arrays[index].consumers)
                if phases[user] == phase
            )
            for index in members
        }
        largest = max(shown, key=lambda index: (arrays[index].size_bytes, -index))
        made = position[arrays[largest].producer or 0]
        after = max(last.values())
        node = nodes[OperationKind.MALLOC, largest, made]
        from_node = bisect_right(positions, after) - 1
        size = sum(arrays[index].size_bytes for index in members if _is_planned(instance, index))
        again = evaluation.extra_seconds - before
        yield Action(node, from_node, tuple(members), unit, after, size, 0.0, again)


def _is_planned(instance: Instance, index: ArrayIndex) -> bool:
    return instance.problem.problem.arrays[index].kind is ArrayKind.PLANNED
