"""Says where the phases of a step begin: backward, and what waits for all gradients.

What a phase has made can be dropped and made again for a later one (:mod:`olla_fx.passes.repeatable`).
Backward follows forward. With gradients clipped by their norm, no parameter is updated before all gradients
were there at some time: what follows the last operator that every update waits for is a third phase.
"""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

from torch import fx

from olla_fx.fx_graph import IN_BACKWARD, first_of_backward, forward_backward_boundary, written_arguments


def phase_starts(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes at which the phases after forward begin; none if the graph has no backward."""
    backward = first_of_backward(graph)
    if backward is None:
        return ()
    if backward.target is forward_backward_boundary:
        return (backward,)
    barrier = _last_before_all_updates(graph, backward)
    return (backward,) if barrier is None else (backward, barrier.next)


def _last_before_all_updates(graph: fx.Graph, backward: fx.Node) -> fx.Node | None:
    """Return the last node behind backward that follows from it and that all updates by it wait for."""
    nodes = list(graph.nodes)
    nodes = nodes[nodes.index(backward) :]
    behind = 1 + max(index for index, node in enumerate(nodes) if node.meta.get(IN_BACKWARD) or not index)
    follows = (1 << behind) - 1
    ancestors: dict[fx.Node, int] = {}
    before_updates: list[int] = []
    for index, node in enumerate(nodes):
        before = reduce(or_, (ancestors.get(source, 0) for source in node.all_input_nodes), 0)
        ancestors[node] = before | 1 << index
        # Weight decay and counts of steps, say, follow from numbers alone.
        if before & follows:
            follows |= 1 << index
            if any(target.op == "placeholder" for target in written_arguments(node)):
                before_updates.append(before)
    common = (reduce(and_, before_updates) & follows) >> behind if before_updates else 0
    return nodes[behind + common.bit_length() - 1] if common else None
