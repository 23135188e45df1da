"""Greedy list scheduling under several rules, forwards and backwards.

At every step an operator that leaves no more than it frees runs at once when it fits under the peak so
far: every later step is only lowered by it. Otherwise a rule decides among the ready ones. Backwards, the
order is built from its end, which suits graphs whose arrays are freed by one operator but read by many.
No rule is best on every graph: each is tried, and stops once it is not better than the best one.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from olla_solvers.graph.flow import FlowGraph
from olla_solvers.order.exchange import exchange
from olla_solvers.order.frontier import Frontier
from olla_solvers.order.lookahead import EFFORTS, lookahead_schedule
from olla_solvers.problem import Bytes, OperatorIndex
from olla_solvers.progress import ProgressLog

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


@dataclass(frozen=True, slots=True)
class Found:
    """An order of a flow graph.

    Attributes:
        order: operator indices.
        peak_bytes: its largest cost.
        rule: what found it.
    """

    order: tuple[OperatorIndex, ...]
    peak_bytes: Bytes
    rule: str


def best_order(flow: FlowGraph, bound_bytes: Bytes, deadline: float, log: ProgressLog | None = None) -> Found:
    """The best order of all rules.

    Args:
        flow: the graph, in captured order, which is the first candidate.
        bound_bytes: stop at an order that needs no more.
        deadline: ``time.monotonic()`` at which to stop trying further rules.
        log: where better orders are noted.

    Returns:
        The best order; never worse than the captured one.
    """
    captured = tuple(range(flow.count))
    best = Found(captured, flow.peak_bytes(captured), "captured")
    if log is not None:
        log.note(best.peak_bytes, bound_bytes, best.rule)
    for name, (rule, backwards) in RULES.items():
        if best.peak_bytes <= bound_bytes or time.monotonic() > deadline:
            break
        order = list_schedule(flow, rule, backwards=backwards, below_bytes=best.peak_bytes)
        if order is not None:
            best = Found(order, flow.peak_bytes(order), f"greedy:{name}")
            if log is not None:
                log.note(best.peak_bytes, bound_bytes, best.rule)
    return best


def best_piece_order(flow: FlowGraph, bound_bytes: Bytes, deadline: float) -> Found:
    """The best order of all rules, of looking ahead, and of exchanges; dearer, for contracted graphs.

    Args:
        flow: the graph.
        bound_bytes: stop at an order that needs no more.
        deadline: ``time.monotonic()`` at which to stop trying.

    Returns:
        The best order; never worse than :func:`best_order`'s.
    """
    best = best_order(flow, bound_bytes, deadline)
    for effort, free, backwards in itertools.product(EFFORTS, (0, bound_bytes), (False, True)):
        if best.peak_bytes <= bound_bytes or time.monotonic() > deadline:
            break
        order = lookahead_schedule(
            flow, effort, backwards=backwards, free_bytes=free, below_bytes=best.peak_bytes
        )
        if order is not None:
            name = "greedy:lookahead" + (", backwards" if backwards else "")
            best = Found(order, flow.peak_bytes(order), name)
    order = exchange(flow, _starts(flow, best), bound_bytes, deadline)
    peak = flow.peak_bytes(order)
    return Found(order, peak, f"{best.rule}, exchanged") if peak < best.peak_bytes else best


def _starts(flow: FlowGraph, best: Found) -> Iterator[tuple[OperatorIndex, ...]]:
    """Orders to exchange operators in: a poor order of another kind often leads further than the best."""
    yield best.order
    for rule, backwards in RULES.values():
        order = list_schedule(flow, rule, backwards=backwards)
        if order is not None:
            yield order


def list_schedule(
    flow: FlowGraph, rule: Rule, *, backwards: bool = False, below_bytes: Bytes | None = None
) -> tuple[OperatorIndex, ...] | None:
    """One order by one rule.

    Args:
        flow: the graph.
        rule: sort key of ready operators; the smallest runs.
        backwards: build the order from its end.
        below_bytes: give up at the first operator that costs this much or more.

    Returns:
        Operator indices first to last, or None when given up.
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
        for changed in {*opened, *(each for each in fell if each in opened_at)}:
            push(changed)
    return tuple(reversed(order)) if backwards else tuple(order)


def free_first(flow: FlowGraph, *, by_net: bool) -> tuple[OperatorIndex, ...]:
    """The plain list schedule that frees memory where it can: a mark to be never worse than.

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
        for changed in {*opened, *(each for each in fell if each in ready)}:
            push(changed)
    return tuple(order)


def _next(
    state: Frontier,
    freeing: list[tuple[Bytes, OperatorIndex]],
    others: list[tuple[tuple[int, ...], OperatorIndex]],
    waiting: Mapping[OperatorIndex, int],
    peak: Bytes,
) -> OperatorIndex:
    """A freeing operator that fits under the peak, else the rule's choice; heaps hold stale entries."""
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
