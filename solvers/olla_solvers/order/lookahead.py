"""Greedy list scheduling that looks ahead to where memory falls again.

A single step shows what an operator adds, not that its result is freed a few operators on. Here each
candidate is tried out: it runs, then whatever lowers memory most among what it made ready, up to a
fixed number of steps. The excursion that comes back to its start, or else falls lowest, at the smallest
cost is taken, up to its lowest point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from olla_solvers.graph.flow import FlowGraph
from olla_solvers.order.frontier import Frontier
from olla_solvers.problem import Bytes, OperatorIndex

EFFORTS = ((10, 10), (30, 40), (100, 150))
"""Ready operators tried out at a step, those that add least, and operators that an excursion may run.

More is not always better: each pair finds the best order of some graph.
"""

MOST_OPERATORS = 1500
"""Larger graphs are left to the rules that need no trial."""


@dataclass(frozen=True, slots=True)
class _Excursion:
    """Operators to run up to the lowest point, the largest cost on the way, and what is alive there."""

    path: tuple[OperatorIndex, ...]
    cost_bytes: Bytes
    low_bytes: Bytes


def lookahead_schedule(
    flow: FlowGraph,
    effort: tuple[int, int],
    *,
    backwards: bool = False,
    free_bytes: Bytes = 0,
    below_bytes: Bytes | None = None,
) -> tuple[OperatorIndex, ...] | None:
    """One order.

    Args:
        flow: the graph.
        effort: candidates and steps, as in :data:`EFFORTS`.
        backwards: build the order from its end.
        free_bytes: costs up to this do not count, as no order avoids them.
        below_bytes: give up at the first operator that costs this much or more.

    Returns:
        Operator indices first to last, or None when given up or the graph is too large.
    """
    if flow.count > MOST_OPERATORS:
        return None
    state = Frontier(flow, backwards=backwards)
    ready = set(state.ready)
    order: list[OperatorIndex] = []
    peak = free_bytes
    while ready:
        for operator in _next(state, ready, peak, effort):
            peak = max(peak, state.cost(operator))
            if below_bytes is not None and peak >= below_bytes:
                return None
            order.append(operator)
            ready.remove(operator)
            ready.update(state.run(operator)[0])
    return tuple(reversed(order)) if backwards else tuple(order)


def _next(
    state: Frontier, ready: set[OperatorIndex], peak: Bytes, effort: tuple[int, int]
) -> Sequence[OperatorIndex]:
    """An operator that lowers memory within the peak, else the best excursion."""
    least = sorted(ready, key=lambda each: (state.net_bytes[each], each))
    for operator in least:
        if state.net_bytes[operator] > 0:
            break
        if state.cost(operator) <= peak:
            return (operator,)
    excursions = [_excursion(state, operator, effort[1]) for operator in least[: effort[0]]]
    start = state.live_bytes
    best = min(
        excursions, key=lambda each: (each.low_bytes > start, max(each.cost_bytes, peak), each.low_bytes)
    )
    return best.path


def _excursion(state: Frontier, first: OperatorIndex, steps: int) -> _Excursion:
    trial = state.copy()
    cost = top = trial.cost(first)
    path = [first]
    opened = set(trial.run(first)[0])
    low, length, low_cost = trial.live_bytes, 1, cost
    while opened and len(path) < steps and low > state.live_bytes:
        operator = _least_net(trial, opened)
        top = max(top, trial.cost(operator))
        opened.remove(operator)
        path.append(operator)
        opened.update(trial.run(operator)[0])
        if trial.live_bytes < low:
            low, length, low_cost = trial.live_bytes, len(path), top
    return _Excursion(tuple(path[:length]), low_cost, low)


def _least_net(state: Frontier, operators: Iterable[OperatorIndex]) -> OperatorIndex:
    return min(operators, key=lambda each: (state.net_bytes[each], each))
