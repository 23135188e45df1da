"""Greedy list scheduling under several rules, forwards and backwards.

At every step an operator that leaves no more than it frees runs at once when it fits under the peak so
far: every later step is only lowered by it. Otherwise a rule decides among the ready ones. Backwards, the
order is built from its end, which suits graphs whose arrays are freed by one operator but read by many.
No rule is best on every graph: all are tried, and each stops once it is not better than the best one.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from olla_solvers.effort.progress import ProgressLog
from olla_solvers.graph.flow import Candidate, FlowGraph
from olla_solvers.order.frontier import Frontier
from olla_solvers.problem import Bytes, OperatorIndex

Rule = Callable[[FlowGraph, Frontier, OperatorIndex, int], tuple[int, ...]]
"""Sort key of a ready operator, from what it adds and how many operators had run when it became ready."""


def _least_net(flow: FlowGraph, state: Frontier, operator: OperatorIndex, opened: int) -> tuple[int, ...]:
    return (state.net_bytes[operator], flow.rise_bytes[operator], operator)


def _least_rise(flow: FlowGraph, state: Frontier, operator: OperatorIndex, opened: int) -> tuple[int, ...]:
    return (state.cost(operator) - state.live_bytes, state.net_bytes[operator], operator)


def _captured(flow: FlowGraph, state: Frontier, operator: OperatorIndex, opened: int) -> tuple[int, ...]:
    return (operator,)


def _captured_backwards(
    flow: FlowGraph, state: Frontier, operator: OperatorIndex, opened: int
) -> tuple[int, ...]:
    return (-operator,)


def _newest(flow: FlowGraph, state: Frontier, operator: OperatorIndex, opened: int) -> tuple[int, ...]:
    return (-opened, state.net_bytes[operator], operator)


RULES: Mapping[str, tuple[Rule, bool]] = MappingProxyType(
    {
        "captured order": (_captured, False),
        "least net": (_least_net, False),
        "least net, backwards": (_least_net, True),
        "captured order, backwards": (_captured_backwards, True),
        "newest first": (_newest, False),
        "newest first, backwards": (_newest, True),
        "least rise": (_least_rise, False),
        "least rise, backwards": (_least_rise, True),
    }
)


def best_order(
    flow: FlowGraph,
    bound_bytes: Bytes,
    deadline: float,
    log: ProgressLog | None = None,
    known: Candidate | None = None,
) -> Candidate:
    """Return the best order of all rules.

    Args:
        flow: the graph, in captured order, which is the first candidate.
        bound_bytes: stop at an order that needs no more.
        deadline: ``time.monotonic()`` at which to stop trying further rules.
        log: notes better orders.
        known: an order to begin from, beside the captured one.

    Returns:
        The best order; never worse than the captured and the known one.
    """
    captured = tuple(range(flow.count))
    best = Candidate(captured, flow.peak_bytes(captured), "captured")
    if known is not None and known.peak_bytes <= best.peak_bytes:
        best = known
    if log is not None:
        log.note(best.peak_bytes, bound_bytes, best.rule)
    for name, (rule, backwards) in RULES.items():
        if best.peak_bytes <= bound_bytes or time.monotonic() > deadline:
            break
        order = list_schedule(flow, rule, backwards=backwards, below_bytes=best.peak_bytes)
        if order is not None:
            best = Candidate(order, flow.peak_bytes(order), f"greedy:{name}")
            if log is not None:
                log.note(best.peak_bytes, bound_bytes, best.rule)
    return best


def list_schedule(
    flow: FlowGraph, rule: Rule, *, backwards: bool = False, below_bytes: Bytes | None = None
) -> tuple[OperatorIndex, ...] | None:
    """Make an order by a rule.

    Args:
        flow: the graph.
        rule: sort key of ready operators; the smallest runs.
        backwards: build the order from its end.
        below_bytes: give up at the first operator that costs this much or more.

    Returns:
        Operator indices first to last, or None if given up.
    """
    state = Frontier(flow, backwards=backwards)
    opened_at = dict.fromkeys(state.ready, 0)
    freeing: list[tuple[Bytes, OperatorIndex]] = []
    others: list[tuple[tuple[int, ...], OperatorIndex]] = []
    order: list[OperatorIndex] = []

    def push(operator: OperatorIndex) -> None:
        if state.net_bytes[operator] <= 0:
            heapq.heappush(freeing, (flow.rise_bytes[operator], operator))
        heapq.heappush(others, (rule(flow, state, operator, opened_at[operator]), operator))

    for operator in state.ready:
        push(operator)
    peak = 0
    while len(order) < flow.count:
        operator = _next(state, freeing, others, opened_at, peak)
        cost = state.cost(operator)
        if below_bytes is not None and cost >= below_bytes:
            return None
        peak = max(peak, cost)
        order.append(operator)
        del opened_at[operator]
        opened, fell = state.run(operator)
        opened_at.update(dict.fromkeys(opened, len(order)))
        for changed in {*opened, *(operator for operator in fell if operator in opened_at)}:
            push(changed)
    return tuple(reversed(order)) if backwards else tuple(order)


def free_first_orders(flow: FlowGraph) -> Iterator[Candidate]:
    """Yield the plain list schedules that free memory when they can: no result may be worse than these."""
    for by_net in (True, False):
        order = free_first(flow, by_net=by_net)
        yield Candidate(order, flow.peak_bytes(order), "free first")


def free_first(flow: FlowGraph, *, by_net: bool) -> tuple[OperatorIndex, ...]:
    """Return the plain list schedule that frees memory when it can.

    Args:
        flow: the graph, in captured order.
        by_net: always the ready operator that adds least to what is alive; otherwise only those that add
            nothing go first, and the captured order decides among the others.

    Returns:
        Operator indices, first to last.
    """
    state = Frontier(flow)
    ready = set(state.ready)
    heap: list[tuple[Bytes, OperatorIndex]] = []
    order: list[OperatorIndex] = []

    def push(operator: OperatorIndex) -> None:
        net = state.net_bytes[operator]
        heapq.heappush(heap, (net if by_net else min(net, 1), operator))

    for operator in ready:
        push(operator)
    while heap:
        operator = heapq.heappop(heap)[1]
        if operator not in ready:
            continue
        ready.remove(operator)
        order.append(operator)
        opened, fell = state.run(operator)
        ready.update(opened)
        for changed in {*opened, *(operator for operator in fell if operator in ready)}:
            push(changed)
    return tuple(order)


def _next(
    state: Frontier,
    freeing: list[tuple[Bytes, OperatorIndex]],
    others: list[tuple[tuple[int, ...], OperatorIndex]],
    waiting: Mapping[OperatorIndex, int],
    peak: Bytes,
) -> OperatorIndex:
    """Return a freeing operator that fits under the peak, else the rule's choice.

    The heaps hold stale entries.
    """
    while freeing:
        operator = freeing[0][1]
        if operator not in waiting:
            heapq.heappop(freeing)
        elif state.cost(operator) <= peak:
            return heapq.heappop(freeing)[1]
        else:
            break
    while others[0][1] not in waiting:
        heapq.heappop(others)
    return heapq.heappop(others)[1]
