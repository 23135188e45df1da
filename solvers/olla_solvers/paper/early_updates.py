"""Makes weight updates run early: OLLA section 4.3, Functions 3 and 4.

A weight update makes nothing and frees its gradient, so there is no use in delaying it. A control edge, of
size 0, from the update to an *anchor*, an operator that can run early itself, makes a solver's latest
timestep for the update small. Function 3 looks for anchors around the update, first at the successors of
what it reads, then farther back; Function 4 follows successors until one has a higher level than the update,
so that no edge closes a cycle, and prefers those far from the end.

The paper's anchor may have to wait for the gradient's producer only because of the edge, and then the best
order can be lost. Anchors are *safe* if

* all that the update waits for precedes the anchor anyhow, and
* ``made(p) - G(p) + rise(v) <= rise(p)`` for the update v and each of its direct predecessors p, where G(p)
  is what p frees in every order.

Proof that safe edges keep the smallest peak: in a best order, move all these updates to right behind their
last direct predecessor; if several meet, in the sequence of their levels. Updates have no successors, so
none waits for another, and every control edge is obeyed: the anchor comes later, or, an update itself, has
moved behind the same operator but has the higher level. Updates make nothing, so every other step sees no
more alive. The update's own step costs at most live + made(p) - G(p) + rise(v), no more than p's did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from olla_solvers.graph.contract import Contracted, freed_bytes
from olla_solvers.graph.flow import FlowArray, FlowGraph, flow_graph
from olla_solvers.ilp.order_columns import levels
from olla_solvers.problem import OperatorIndex

Edge = tuple[OperatorIndex, OperatorIndex]


def with_early_updates(flow: FlowGraph, *, safe: bool = True) -> Contracted:
    """Add a control edge for every weight update that has an anchor: Function 3.

    Args:
        flow: the graph.
        safe: only edges that keep the smallest peak; otherwise the paper's.

    Returns:
        The graph with its control edges, renumbered so that it is executable, and the way back.
    """
    import networkx

    edges = [(earlier, later) for later, direct in enumerate(flow.predecessors) for earlier in direct]
    edges += control_edges(flow, safe=safe)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(flow.count))
    graph.add_edges_from(edges)
    order = tuple(networkx.lexicographical_topological_sort(graph))
    number = {operator: position for position, operator in enumerate(order)}
    arrays = [
        FlowArray(array.size_bytes, number[array.producer], tuple(sorted(number[c] for c in array.consumers)))
        for array in flow.arrays
    ]
    renumbered = flow_graph(
        [flow.rise_bytes[operator] for operator in order],
        arrays,
        ((number[earlier], number[later]) for earlier, later in edges),
    )
    return Contracted(renumbered, tuple((operator,) for operator in order))


def control_edges(flow: FlowGraph, *, safe: bool = True) -> tuple[Edge, ...]:
    """Return the control edges of Function 3: from each weight update that has one to its anchor.

    Args:
        flow: the graph.
        safe: only anchors that keep the smallest peak; otherwise the paper's.

    Returns:
        Pairs (update, anchor), at most one for an update.
    """
    forward, backward = levels(flow)
    edges = []
    for update in weight_updates(flow):
        if safe and not _fits_behind_its_inputs(flow, update):
            continue

        def accepts(candidate: OperatorIndex, update: OperatorIndex = update) -> bool:
            if forward[candidate] <= forward[update]:
                return False
            waits_for = flow.predecessors[update]
            return not safe or all(flow.ancestors[candidate] >> earlier & 1 for earlier in waits_for)

        anchor = _anchor(flow, update, backward, accepts)
        if anchor is not None:
            edges.append((update, anchor))
    return tuple(edges)


def weight_updates(flow: FlowGraph) -> tuple[OperatorIndex, ...]:
    """Return the operators that only free memory: they read, and nothing follows from them."""
    return tuple(
        operator
        for operator in range(flow.count)
        if flow.inputs[operator] and not flow.made_bytes[operator] and not flow.successors[operator]
    )


def _fits_behind_its_inputs(flow: FlowGraph, update: OperatorIndex) -> bool:
    made, rise = flow.made_bytes, flow.rise_bytes
    return all(
        made[earlier] - freed_bytes(flow, earlier)[0] + rise[update] <= rise[earlier]
        for earlier in flow.predecessors[update]
    )


def _anchor(
    flow: FlowGraph,
    update: OperatorIndex,
    backward: Sequence[int],
    accepts: Callable[[OperatorIndex], bool],
) -> OperatorIndex | None:
    """Return the anchor of an update: of candidates ever farther from it the highest backward level."""
    starts, met = {update}, {update}
    visited: dict[OperatorIndex, OperatorIndex | None] = {}
    while starts:
        starts = {earlier for start in starts for earlier in flow.predecessors[start]} - met
        met |= starts
        candidates = [_candidate(flow, start, backward, accepts, visited) for start in sorted(starts)]
        known = [candidate for candidate in candidates if candidate is not None]
        if known:
            return max(known, key=lambda v: backward[v])
    return None


def _candidate(
    flow: FlowGraph,
    start: OperatorIndex,
    backward: Sequence[int],
    accepts: Callable[[OperatorIndex], bool],
    visited: dict[OperatorIndex, OperatorIndex | None],
) -> OperatorIndex | None:
    """Return the acceptable operator behind a start that is farthest from the end: Function 4."""
    todo = [start]
    while todo:
        operator = todo[-1]
        if operator in visited:
            todo.pop()
            continue
        rejected = [later for later in flow.successors[operator] if not accepts(later)]
        waiting = [later for later in rejected if later not in visited]
        if waiting:
            todo += waiting
            continue
        choices = [later for later in flow.successors[operator] if accepts(later)]
        choices += [choice for later in rejected if (choice := visited[later]) is not None]
        visited[operator] = max(choices, key=lambda v: (backward[v], -v), default=None)
    return visited[start]
