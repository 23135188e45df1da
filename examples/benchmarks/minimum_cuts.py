"""Times our minimum cuts beside libraries' on the cuts that ordering asks for.

Graph files are ordered with the default methods, and every network whose minimum cut is needed on the way is
kept. Then each implementation gets all of them: it builds its graph from the list of edges, finds the maximum
flow, and the nodes from which the sink can still be reached, which must be the same for all.

    pip install igraph PyMaxflow ortools
    python examples/benchmarks/minimum_cuts.py captured/*.json --time-limit 5
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from olla_solvers.graph import minimum_cut
from olla_solvers.graph.minimum_cut import ENDLESS, SINK, SOURCE, Network
from olla_solvers.order import order
from olla_solvers.problem import Problem


@dataclass(frozen=True)
class Case:
    """A network: its number of nodes, and its edges as (tail, head, capacity)."""

    nodes: int
    edges: list[tuple[int, int, int]]


class RecordingNetwork(Network):
    """Keeps every network whose flow is asked for."""

    cases: list[Case]

    def __init__(self, deadline: float) -> None:
        """Start without edges."""
        super().__init__(deadline)
        self._case = Case(2, [])

    def edge(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge, and note it."""
        super().edge(tail, head, capacity)
        self._case.edges.append((tail, head, capacity))

    def maximum_flow(self) -> int:
        """Note the network, and find the flow."""
        nodes = 1 + max((max(tail, head) for tail, head, _ in self._case.edges), default=1)
        self.cases.append(Case(max(2, nodes), self._case.edges))
        return super().maximum_flow()


def by_dinic(case: Case) -> tuple[int, list[bool]]:
    """Our own."""
    network = Network(float("inf"))
    for _ in range(case.nodes - 2):
        network.node()
    for edge in case.edges:
        network.edge(*edge)
    return network.maximum_flow(), network.reaching_sink()


def by_igraph(case: Case) -> tuple[int, list[bool]]:
    """Igraph's push-relabel algorithm; its capacities are floating point."""
    import igraph

    graph = igraph.Graph(case.nodes, [edge[:2] for edge in case.edges], directed=True)
    total = 1.0 + sum(capacity for _, _, capacity in case.edges if capacity < ENDLESS)
    cut = graph.mincut(SOURCE, SINK, capacity=[min(total, float(edge[2])) for edge in case.edges])
    reaching = [False] * case.nodes
    for node in cut.partition[1]:
        reaching[node] = True
    return round(cut.value), reaching


def by_pymaxflow(case: Case) -> tuple[int, list[bool]]:
    """PyMaxflow: the algorithm of Boykov and Kolmogorov."""
    import maxflow

    graph = maxflow.GraphInt(case.nodes, len(case.edges))
    graph.add_nodes(case.nodes)
    for tail, head, capacity in case.edges:
        if tail == SOURCE and head == SINK:
            graph.add_tedge(SINK, capacity, 0)
            graph.add_tedge(SINK, 0, capacity)
        elif tail == SOURCE:
            graph.add_tedge(head, capacity, 0)
        elif head == SINK:
            graph.add_tedge(tail, 0, capacity)
        else:
            graph.add_edge(tail, head, capacity, 0)
    flow = graph.maxflow()
    reaching = [bool(graph.get_segment(node)) for node in range(case.nodes)]
    reaching[SOURCE], reaching[SINK] = False, True
    return flow, reaching


def by_ortools(case: Case) -> tuple[int, list[bool]]:
    """OR-tools' push-relabel algorithm, in whole numbers."""
    from ortools.graph.python import max_flow

    solver = max_flow.SimpleMaxFlow()
    total = 1 + sum(capacity for _, _, capacity in case.edges if capacity < ENDLESS)
    tails, heads, capacities = zip(*case.edges, strict=True)
    solver.add_arcs_with_capacity(tails, heads, [min(total, capacity) for capacity in capacities])
    solver.solve(SOURCE, SINK)
    reaching = [False] * case.nodes
    for node in solver.get_sink_side_min_cut():
        reaching[node] = True
    return solver.optimal_flow(), reaching


METHODS: dict[str, Callable[[Case], tuple[int, list[bool]]]] = {
    "ours": by_dinic,
    "igraph": by_igraph,
    "PyMaxflow": by_pymaxflow,
    "OR-tools": by_ortools,
}


def recorded(problem: Problem, time_limit: float) -> tuple[list[Case], float]:
    """Return the networks that ordering a problem asks for, and the seconds that ordering takes."""
    start = time.process_time()
    order(problem, solver="none", time_limit=time_limit)
    seconds = time.process_time() - start
    RecordingNetwork.cases = []
    plain, minimum_cut.Network = minimum_cut.Network, RecordingNetwork
    try:
        order(problem, solver="none", time_limit=time_limit)
    finally:
        minimum_cut.Network = plain
    return RecordingNetwork.cases, seconds


def compare(cases: Sequence[Case]) -> dict[str, tuple[float, float]]:
    """Return for each implementation the processor seconds for all networks, and for the slowest of them."""
    seconds = {}
    for name, method in METHODS.items():
        times = []
        method(cases[0])
        for case in cases:
            start = time.process_time()
            answer = method(case)
            times.append(time.process_time() - start)
            if answer != by_dinic(case):
                raise SystemExit(f"{name} has another answer for a network of {case.nodes} nodes")
        seconds[name] = (sum(times), max(times, default=0.0))
    return seconds


def main() -> int:
    """Run the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="graph files")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds of ordering a graph")
    parser.add_argument("--most", type=int, default=2000, help="networks of a graph, evenly taken")
    options = parser.parse_args()
    names = [f"{name}, {what}" for name in METHODS for what in ("ms", "slowest ms")]
    print(f"| graph | order, ms | cuts | nodes | {' | '.join(names)} |")
    for path in options.files:
        cases, ordering = recorded(Problem.load(path), options.time_limit)
        if not cases:
            continue
        cases = cases[:: max(1, len(cases) // options.most)]
        nodes = (
            f"{sum(case.nodes for case in cases) / len(cases):.0f} (most {max(case.nodes for case in cases)})"
        )
        figures = [f"{1000 * value:.2f}" for pair in compare(cases).values() for value in pair]
        print(
            f"| {path.stem} | {1000 * ordering:.0f} | {len(cases)} | {nodes} | {' | '.join(figures)} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
