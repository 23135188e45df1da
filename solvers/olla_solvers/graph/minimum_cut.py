"""Finds the state between two others in which least is alive, as a minimum cut.

For states ``low`` within ``high``, a cut separates the operators of ``low`` (the source) from those
outside ``high`` (the sink); the operators on the source's side are the state. An array is an edge from
its producer to a node of its own, as wide as the array, and from there endless edges lead to its
consumers: it is cut, and so paid, just if its producer is in the state and a consumer is not. Endless
edges from each operator to its predecessors make the source's side a state. So the minimum cut is the
smallest live(Z) over ``low <= Z <= high`` (Picard, "Maximal closure of a graph and applications to
combinatorial problems", 1976), found by maximum flow (Dinic, "Algorithm for solution of a problem of
maximum flow in networks with power estimation", 1970).
"""

from __future__ import annotations

from collections.abc import Mapping

from olla_solvers.effort.deadline import check_time
from olla_solvers.graph.bitsets import bits_of
from olla_solvers.graph.flow import FlowGraph
from olla_solvers.problem import Bytes, OperatorIndex

SOURCE, SINK = 0, 1

ENDLESS = 1 << 62
"""More bytes than any problem has."""

CHECK_EVERY = 256
"""Steps of the flow between two checks of the deadline."""


class Network:
    """A directed graph with capacities, and the maximum flow from node 0 to node 1."""

    def __init__(self, deadline: float) -> None:
        """Start with source and sink alone."""
        self._heads: list[int] = []
        self._room: list[int] = []
        self._edges: list[list[int]] = [[], []]
        self._deadline = deadline
        self._steps = 0

    def node(self) -> int:
        """Add a node and return its number."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, tail: int, head: int, capacity: int) -> int:
        """Add an edge, and its reverse without capacity; return its number."""
        number = len(self._heads)
        self._edges[tail].append(number)
        self._edges[head].append(number + 1)
        self._heads += (head, tail)
        self._room += (capacity, 0)
        return number

    def widen(self, edge: int, by: int) -> None:
        """Add to the capacity of an edge; the flow so far stays."""
        self._room[edge] += by

    def flow(self) -> list[int]:
        """Return the flow so far, as what is left of every capacity, for :meth:`resume`."""
        return list(self._room)

    def resume(self, flow: list[int]) -> None:
        """Go back to what :meth:`flow` returned."""
        self._room = list(flow)

    def maximum_flow(self) -> int:
        """Find the maximum flow by Dinic's algorithm; return what is added to the flow so far.

        Raises:
            DeadlinePassedError: if the deadline passes.
        """
        flow = 0
        while True:
            check_time(self._deadline)
            levels = self._levels()
            if levels[SINK] < 0:
                return flow
            flow += self._blocking_flow(levels)

    def reaching_sink(self) -> list[bool]:
        """Return for each node True if the sink can still be reached from it, after the flow."""
        reached = [False] * len(self._edges)
        reached[SINK] = True
        todo = [SINK]
        for node in todo:
            for edge in self._edges[node]:
                tail = self._heads[edge]
                if self._room[edge ^ 1] and not reached[tail]:
                    reached[tail] = True
                    todo.append(tail)
        return reached

    def reached_from_source(self) -> list[bool]:
        """Return for each node True if it can still be reached from the source, after the flow."""
        return [level >= 0 for level in self._levels()]

    def _levels(self) -> list[int]:
        """Return distances from the source over edges with room; -1 for nodes that are not reached."""
        levels = [-1] * len(self._edges)
        levels[SOURCE] = 0
        todo = [SOURCE]
        heads, room = self._heads, self._room
        for node in todo:
            level = levels[node] + 1
            for edge in self._edges[node]:
                if room[edge] and levels[heads[edge]] < 0:
                    levels[heads[edge]] = level
                    todo.append(heads[edge])
            if levels[SINK] >= 0:
                break
        return levels

    def _blocking_flow(self, levels: list[int]) -> int:
        """Push along shortest paths until none is left; a walk that is cut resumes before the cut."""
        heads, room, edges = self._heads, self._room, self._edges
        tried = [0] * len(edges)
        total, node = 0, SOURCE
        path: list[int] = []
        while True:
            self._steps += 1
            if self._steps % CHECK_EVERY == 0:
                check_time(self._deadline)
            if node == SINK:
                pushed = min(room[edge] for edge in path)
                total += pushed
                for edge in path:
                    room[edge] -= pushed
                    room[edge ^ 1] += pushed
                cut = next(at for at, edge in enumerate(path) if not room[edge])
                node = heads[path[cut] ^ 1]
                del path[cut:]
                continue
            level, outgoing, at = levels[node] + 1, edges[node], tried[node]
            while at < len(outgoing) and not (room[outgoing[at]] and levels[heads[outgoing[at]]] == level):
                at += 1
            tried[node] = at
            if at < len(outgoing):
                path.append(outgoing[at])
                node = heads[outgoing[at]]
            elif path:
                node = heads[path.pop() ^ 1]
                tried[node] += 1
            else:
                return total


def smallest_state(
    flow: FlowGraph, low: int, high: int, live_bytes: Bytes, deadline: float
) -> tuple[Bytes, int]:
    """Return the state with least alive between two states.

    Args:
        flow: the graph.
        low: bitset of operators that have run.
        high: bitset of operators that may have run; ``low`` and ``high`` must be states.
        live_bytes: bytes alive in ``low``.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        The bytes alive, and the largest state in which no more are.

    Raises:
        DeadlinePassedError: if the deadline passes.
    """
    network = Network(deadline)
    nodes = {operator: network.node() for operator in bits_of(high & ~low)}
    untouched = live_bytes - _add_arrays(flow, network, nodes, low, high)
    for operator, node in nodes.items():
        for predecessor in flow.predecessors[operator]:
            if predecessor in nodes:
                network.edge(node, nodes[predecessor], ENDLESS)
    least = network.maximum_flow()
    outside = network.reaching_sink()
    state = low
    for operator, node in nodes.items():
        if not outside[node]:
            state |= 1 << operator
    return untouched + least, state


def live_bytes(flow: FlowGraph, state: int) -> Bytes:
    """Return the bytes alive after just the operators of a bitset have run."""
    return sum(
        array.size_bytes
        for array in flow.arrays
        if state >> array.producer & 1 and any(not state >> consumer & 1 for consumer in array.consumers)
    )


def _add_arrays(
    flow: FlowGraph, network: Network, nodes: Mapping[OperatorIndex, int], low: int, high: int
) -> Bytes:
    """Add the edges for every array that some operator between touches.

    Returns:
        The bytes of these arrays that are alive in ``low``.
    """
    touched: set[int] = set()
    for operator in nodes:
        touched.update(flow.inputs[operator], flow.outputs[operator])
    alive = 0
    for index in touched:
        array = flow.arrays[index]
        tail = nodes.get(array.producer, SOURCE)
        if tail == SOURCE:
            alive += array.size_bytes
        inside = [nodes[reader] for reader in array.consumers if reader in nodes]
        if any(not high >> consumer & 1 for consumer in array.consumers):
            network.edge(tail, SINK, array.size_bytes)
        elif len(inside) == 1:
            network.edge(tail, inside[0], array.size_bytes)
        else:
            middle = network.node()
            network.edge(tail, middle, array.size_bytes)
            for node in inside:
                network.edge(middle, node, ENDLESS)
    return alive
