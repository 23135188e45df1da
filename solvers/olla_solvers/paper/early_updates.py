"""Weight updates run early: OLLA section 4.3, Functions 3 and 4.

A weight update makes nothing and frees its gradient, so there is no use in delaying it. A control edge, of
size 0, from the update to an *anchor*, an operator that can run early itself, makes a solver's latest
timestep for the update small. Function 3 looks for anchors around the update, first at the successors of
what it reads, then farther back; Function 4 follows successors until one has a higher level than the update,
so that no edge closes a cycle, and prefers those far from the end.

The paper's anchor may have to wait for the gradient's producer only because of the edge, and then the best
order can be lost. Anchors are *safe* where

* all that the update waits for precedes the anchor anyhow, and
* ``made(p) - G(p) + rise(v) <= rise(p)`` for the update v and each of its direct predecessors p, where G(p)
  is what p frees in every order.

Proof that safe edges keep the smallest peak: in a best order, move all these updates to right behind their
last direct predecessor; where several meet, in the sequence of their levels. Updates have no successors, so
none waits for another, and every control edge is obeyed: the anchor comes later, or, an update itself, has
moved behind the same operator but has the higher level. Updates make nothing, so every other step sees no
more alive. The update's own step costs at most live + made(p) - G(p) + rise(v), no more than p's did.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from olla_solvers.graph.contract import Contracted, freed_bytes
from olla_solvers.graph.flow import FlowArray, FlowGraph, flow_graph
from olla_solvers.problem import OperatorIndex

Edge = tuple[OperatorIndex, OperatorIndex]


def with_early_updates(flow: FlowGraph, *, safe: bool = True) -> Contracted:
    """Function 3: add a control edge for every weight update that has an anchor.

    Args:
        flow: the graph.
        safe: only edges that keep the smallest peak; otherwise the paper's.

    Returns:
        The graph with its control edges, renumbered so that it is executable, and the way back.
    """
    edges = control_edges(flow, safe=safe)
    all_edges = [(earlier, later) for later, direct in enumerate(flow.predecessors) for earlier in direct]
    order = _executable(flow.count, [*all_edges, *edges])
    number = {operator: position for position, operator in enumerate(order)}
    arrays = [
        FlowArray(each.size_bytes, number[each.producer], tuple(sorted(number[c] for c in each.consumers)))
        for each in flow.arrays
    ]
    renumbered = flow_graph(
        [flow.rise_bytes[operator] for operator in order],
        arrays,
        ((number[earlier], number[later]) for earlier, later in (*all_edges, *edges)),
    )
    return Contracted(renumbered, tuple((operator,) for operator in order))


def control_edges(flow: FlowGraph, *, safe: bool = True) -> tuple[Edge, ...]:
    """The control edges of Function 3: from each weight update that has one to its anchor.

    Args:
        flow: the graph.
        safe: only anchors that keep the smallest peak; otherwise the paper's.

    Returns:
        Pairs (update, anchor), at most one for an update.
    """
    forward = levels(flow.predecessors, range(flow.count))
    backward = levels(flow.successors, range(flow.count)[::-1])
    edges = []
    for update in weight_updates(flow):
        if safe and not _fits_behind_its_inputs(flow, update):
            continue

        def accepts(candidate: OperatorIndex, update: OperatorIndex = update) -> bool:
            if forward[candidate] <= forward[update]:
                return False
            waits_for = flow.predecessors[update]
            return not safe or all(flow.ancestors[candidate] >> each & 1 for each in waits_for)

        anchor = _anchor(flow, update, backward, accepts)
        if anchor is not None:
            edges.append((update, anchor))
    return tuple(edges)


def weight_updates(flow: FlowGraph) -> tuple[OperatorIndex, ...]:
    """Operators that only free memory: they read, and nothing follows from them."""
    return tuple(
        operator
        for operator in range(flow.count)
        if flow.inputs[operator] and not flow.made_bytes[operator] and not flow.successors[operator]
    )


def levels(before: Sequence[Sequence[OperatorIndex]], order: Sequence[OperatorIndex]) -> list[int]:
    """The levelization: for each operator the longest distance from one without predecessors.

    Args:
        before: for each operator the direct predecessors; for levels from the end, the successors.
        order: executable with regard to these.

    Returns:
        Levels from 0.
    """
    level = [0] * len(before)
    for operator in order:
        level[operator] = 1 + max((level[each] for each in before[operator]), default=-1)
    return level


def _fits_behind_its_inputs(flow: FlowGraph, update: OperatorIndex) -> bool:
    made, rise = flow.made_bytes, flow.rise_bytes
    return all(
        made[each] - freed_bytes(flow, each)[0] + rise[update] <= rise[each]
        for each in flow.predecessors[update]
    )


def _anchor(
    flow: FlowGraph,
    update: OperatorIndex,
    backward: Sequence[int],
    accepts: Callable[[OperatorIndex], bool],
) -> OperatorIndex | None:
    """Function 3 for one update: candidates ever farther from it, the highest backward level of them."""
    starts, met = {update}, {update}
    visited: dict[OperatorIndex, OperatorIndex | None] = {}
    while starts:
        starts = {each for start in starts for each in flow.predecessors[start]} - met
        met |= starts
        found = [_candidate(flow, start, backward, accepts, visited) for start in sorted(starts)]
        best = max((each for each in found if each is not None), key=lambda v: backward[v], default=None)
        if best is not None:
            return best
    return None


def _candidate(
    flow: FlowGraph,
    start: OperatorIndex,
    backward: Sequence[int],
    accepts: Callable[[OperatorIndex], bool],
    visited: dict[OperatorIndex, OperatorIndex | None],
) -> OperatorIndex | None:
    """Function 4 with a stack: the acceptable operator behind a start that is farthest from the end."""
    todo = [start]
    while todo:
        operator = todo[-1]
        if operator in visited:
            todo.pop()
            continue
        rejected = [each for each in flow.successors[operator] if not accepts(each)]
        waiting = [each for each in rejected if each not in visited]
        if waiting:
            todo += waiting
            continue
        choices = [each for each in flow.successors[operator] if accepts(each)]
        choices += [choice for each in rejected if (choice := visited[each]) is not None]
        visited[operator] = max(choices, key=lambda v: (backward[v], -v), default=None)
    return visited[start]


def _executable(count: int, edges: Sequence[Edge]) -> tuple[OperatorIndex, ...]:
    """The executable sequence nearest to the given one."""
    successors: list[list[OperatorIndex]] = [[] for _ in range(count)]
    missing = [0] * count
    for earlier, later in edges:
        successors[earlier].append(later)
        missing[later] += 1
    ready = [operator for operator in range(count) if not missing[operator]]
    order = []
    while ready:
        operator = heapq.heappop(ready)
        order.append(operator)
        for later in successors[operator]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, later)
    return tuple(order)
