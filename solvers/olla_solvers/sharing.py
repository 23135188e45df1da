"""Decides which operators make their results in the memory of an array that they read, with the order.

A *pair* of arrays (read, made) says that the second one's producer may write it over the first one, once
nobody else needs that. What this costs is precedence: all others that read the first one come before. Two
problems without pairs tell what pairs are worth:

* :func:`taken_over`: the given pairs are one array each, whose other readers precede. It is exact: its orders
  are those that allow these pairs, at their very cost.
* :func:`relaxed`: operators that may write over an array do not read it. An order with some of the pairs
  needs no less than it does here: while such an operator runs, the array is gone just if all others have read
  it, which is when the pair may be taken; at all other steps as much is alive, or less. So a bound of this
  problem holds for every order with every choice of pairs.

:func:`choose_pairs` branches on pairs, one taken or given up at a time, and bounds by the relaxed problem of
those that are left (Land and Doig, "An automatic method of solving discrete programming problems", 1960).
Both are ordinary problems, so that every method of ordering proves what it proves of others. On nearly all
training steps the precedence bound of the first relaxed problem ends it: where a result could be written over
an array that somebody else reads, too, is not where the peak is.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from olla_solvers.analysis import peak_bytes, resident_bytes, timesteps
from olla_solvers.errors import ProblemError
from olla_solvers.graph.bitsets import ancestors
from olla_solvers.order.bounds import precedence_bound
from olla_solvers.plan import Schedule
from olla_solvers.problem import Array, ArrayKind, OperatorIndex, Problem

Pair: TypeAlias = tuple[int, int]
"""Indices of an array that is read and of the one that may be written over it."""

MOST_ORDERS = 16
"""Problems that are ordered for a choice at most."""


@dataclass(frozen=True)
class Choice:
    """Pairs that are taken, and an order for them.

    Attributes:
        pairs: those that are taken.
        schedule: an order of :func:`taken_over` with them. Its bound holds for all orders with any pairs.
    """

    pairs: tuple[Pair, ...]
    schedule: Schedule


@dataclass(frozen=True)
class _Node:
    """A part of all choices: some pairs are taken, some are undecided."""

    taken: tuple[Pair, ...]
    open: tuple[Pair, ...]


def check_pairs(problem: Problem, pairs: Sequence[Pair]) -> None:
    """Check that the second array of each pair can be made in the place of the first one.

    Raises:
        ProblemError: if a pair is not of two planned arrays of one size, of which the producer of the second
            one reads the first one.
    """
    for read, made in pairs:
        source, result = problem.arrays[read], problem.arrays[made]
        names = f"array {result.name!r} cannot be written over array {source.name!r}"
        if source.kind is not ArrayKind.PLANNED or result.kind is not ArrayKind.PLANNED:
            raise ProblemError(f"{names}: both must be planned")
        if result.producer not in source.consumers:
            raise ProblemError(f"{names}: its producer does not read that")
        if source.size_bytes != result.size_bytes or source.alignment % result.alignment:
            raise ProblemError(f"{names}: size or alignment is another")


def taken_over(problem: Problem, pairs: Sequence[Pair]) -> Problem:
    """Return the problem in which pairs are one array each, under the first one's name.

    Raises:
        ProblemError: if no order allows all of them.
    """
    return _restated(problem, pairs, ())


def relaxed(problem: Problem, pairs: Sequence[Pair], taken: Sequence[Pair] = ()) -> Problem:
    """Return a problem whose orders need no more than with any of the pairs; see the module docstring.

    Args:
        problem: the graph.
        pairs: may be taken or not.
        taken: are taken.

    Raises:
        ProblemError: if no order allows all pairs that are taken.
    """
    return _restated(problem, taken, pairs)


def allowed_pairs(problem: Problem, order: Sequence[OperatorIndex], pairs: Sequence[Pair]) -> list[Pair]:
    """Return pairs that an order allows, of those for one array the costliest.

    Args:
        problem: the graph.
        order: of its operators.
        pairs: to choose from.
    """
    timestep = timesteps(order)
    resident = resident_bytes(problem, order)

    def time_of(pair: Pair) -> int:
        return timestep[_producer(problem, pair[1])]

    allowed: list[Pair] = []
    read_by, made = set[int](), set[int]()
    for pair in sorted(pairs, key=lambda pair: -resident[time_of(pair)]):
        last = max(timestep[reader] for reader in problem.arrays[pair[0]].consumers)
        if last == time_of(pair) and pair[0] not in read_by and pair[1] not in made:
            allowed.append(pair)
            read_by.add(pair[0])
            made.add(pair[1])
    return allowed


def choose_pairs(
    problem: Problem,
    pairs: Sequence[Pair],
    schedule: Schedule,
    order: Callable[[Problem], Schedule],
    most_orders: int = MOST_ORDERS,
    least_gain: float = 0.0,
    seconds: float = math.inf,
) -> Choice:
    """Choose pairs and an order for the smallest peak.

    Args:
        problem: the graph.
        pairs: to choose from.
        schedule: an order without any.
        order: orders a problem.
        most_orders: problems to order at most; with enough of them, and proven orders, the choice is proven.
        least_gain: share of the peak; less than it is not looked for.
        seconds: processor time after which no further problem is ordered.

    Returns:
        No pairs and the given order, if none lowers the peak.

    Raises:
        ProblemError: if a pair cannot be one; see :func:`check_pairs`.
    """
    check_pairs(problem, pairs)
    pairs = _possible(problem, pairs)
    best = Choice((), schedule)
    bound = precedence_bound(relaxed(problem, pairs)) if pairs else schedule.lower_bound_bytes
    if not pairs or bound >= (1 - least_gain) * schedule.peak_bytes:
        return best
    best = _improved(problem, best, allowed_pairs(problem, schedule.order, pairs), schedule.order)
    number = itertools.count()
    waiting = [(bound, next(number), _Node((), tuple(pairs)))]
    closed_bytes = best.schedule.peak_bytes
    orders, last = 0, time.process_time() + seconds
    while waiting and waiting[0][0] < (1 - least_gain) * best.schedule.peak_bytes:
        if orders >= most_orders or time.process_time() >= last:
            break
        bound, _, node = heapq.heappop(waiting)
        try:
            schedule = order(relaxed(problem, node.open, node.taken))
        except ProblemError:
            continue
        orders += 1
        bound = max(bound, schedule.lower_bound_bytes)
        allowed = allowed_pairs(problem, schedule.order, node.open)
        best = _improved(problem, best, [*node.taken, *allowed], schedule.order)
        if not node.open:
            closed_bytes = min(closed_bytes, bound)
        elif bound < best.schedule.peak_bytes:
            for part in _parts(problem, node, allowed, schedule.order):
                heapq.heappush(waiting, (bound, next(number), part))
    bound = min([closed_bytes, best.schedule.peak_bytes, *(bound for bound, _, _ in waiting)])
    return replace(best, schedule=replace(best.schedule, lower_bound_bytes=bound)) if best.pairs else best


def _possible(problem: Problem, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that some order allows: nobody reads the first array who waits for the second one."""
    reached = ancestors(problem.predecessors, problem.captured_order) if pairs else []
    return [
        (read, made)
        for read, made in pairs
        if not any(
            reached[reader] >> _producer(problem, made) & 1 for reader in problem.arrays[read].consumers
        )
    ]


def _improved(
    problem: Problem, best: Choice, pairs: Sequence[Pair], order: Sequence[OperatorIndex]
) -> Choice:
    """Return a choice of pairs in an order that allows them, if it is better."""
    peak = peak_bytes(taken_over(problem, pairs), order)
    if peak >= best.schedule.peak_bytes:
        return best
    return Choice(tuple(pairs), replace(best.schedule, order=tuple(order), peak_bytes=peak, proved_by=None))


def _parts(
    problem: Problem, node: _Node, allowed: Sequence[Pair], order: Sequence[OperatorIndex]
) -> Iterator[_Node]:
    """Yield two parts of a node's choices: with its costliest pair that the order forbids, and without it."""
    resident = resident_bytes(problem, order)
    timestep = timesteps(order)
    pair = max(
        node.open,
        key=lambda pair: (pair not in allowed, resident[timestep[_producer(problem, pair[1])]]),
    )
    left = tuple(other for other in node.open if other != pair)
    yield _Node(node.taken, left)
    apart = tuple(other for other in left if other[0] != pair[0] and other[1] != pair[1])
    yield _Node((*node.taken, pair), apart)


def _restated(problem: Problem, taken: Sequence[Pair], undecided: Sequence[Pair]) -> Problem:
    arrays = problem.arrays
    place = list(range(len(arrays)))
    for read, made in taken:
        place[made] = read
    for index in range(len(arrays)):
        while place[index] != place[place[index]]:
            place[index] = place[place[index]]
    readers = [set(array.consumers) for array in arrays]
    before = set(problem.before)
    for read, made in taken:
        producer = _producer(problem, made)
        before.update((other, producer) for other in arrays[read].consumers if other != producer)
        before.update((producer, reader) for reader in arrays[made].consumers)
    for index, array in enumerate(arrays):
        readers[place[index]].update(array.consumers)
    for read, made in undecided:
        producer = _producer(problem, made)
        before.add((_producer(problem, read), producer))
        readers[place[read]].discard(producer)
    kept: list[Array] = []
    for index, array in enumerate(arrays):
        if place[index] == index:
            kept.append(replace(array, consumers=tuple(sorted(readers[index]))))
    return replace(problem, arrays=tuple(kept), before=tuple(sorted(before)))


def _producer(problem: Problem, array: int) -> OperatorIndex:
    producer = problem.arrays[array].producer
    if producer is None:
        raise ProblemError(f"static array {problem.arrays[array].name!r} is in a pair")
    return producer
