"""Places a plan again for runs that pause, while others may use what they do not hold.

A run may wait for its caller in the middle, with some of its arrays alive, and leave some at its end. Other
plans can use the rest of its buffer meanwhile, if that is in one piece: so what is alive at the pause is
stacked up from the bottom, and what is left at the end hangs from the top. All arrays alive at one moment
overlap in time, so each of the two is a stack without a gap, in some sequence. The last to die lie at the
end of the buffer, so that the piece in the middle grows as they die; if the fast heuristics place the rest
around them no higher, or hardly, that is the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from olla_solvers.place.heuristics import best_of_heuristics
from olla_solvers.place.task import Candidate
from olla_solvers.plan import MemoryPlan, Span
from olla_solvers.problem import Bytes, Offset, Problem, Timestep
from olla_solvers.spans import scratching, spans_of
from olla_solvers.spans.checks import given_collision
from olla_solvers.validate import validate

Key = Callable[[Span], tuple[int, ...]]


def last_to_die(span: Span) -> tuple[int, ...]:
    """Return the key that sorts the latest end of a lifetime first; of equals the earliest birth."""
    return (-span.upper, span.lower)


def first_born(span: Span) -> tuple[int, ...]:
    """Return the key that sorts the earliest birth first; of equals the latest end of a lifetime."""
    return (span.lower, -span.upper)


def held_at(problem: Problem, plan: MemoryPlan, operator: str) -> tuple[Offset, Offset]:
    """Return the addresses between which everything lies that is alive while an operator runs.

    Args:
        problem: the graph.
        plan: of it.
        operator: its name.

    Returns:
        The first byte, and the end; both 0 if nothing is alive.
    """
    spans, offsets = _placed(problem, plan)
    at = plan.order.index(operator)
    alive = [
        (offset, offset + span.size_bytes)
        for span, offset in zip(spans, offsets, strict=True)
        if span.size_bytes and span.lower <= at < span.upper
    ]
    return min((low for low, _ in alive), default=0), max((high for _, high in alive), default=0)


def place_at_ends(
    problem: Problem, plan: MemoryPlan, pause: str | None, end: str | None, most_bytes: Bytes
) -> MemoryPlan | None:
    """Place a plan's arrays again, those alive at a pause lowest and those left at the end highest.

    Args:
        problem: the graph.
        plan: of it; its order is kept.
        pause: the operator at which the run waits; None if it does not.
        end: the operator at which what is left is all that is alive; None if nothing is left.
        most_bytes: the buffer may be so large.

    Returns:
        A plan that has passed :func:`~olla_solvers.validate.validate`; None if none was found.
    """
    spans, _ = _placed(problem, plan)
    low = [] if pause is None else _alive_at(spans, plan.order.index(pause))
    high = [] if end is None else [i for i in _alive_at(spans, plan.order.index(end)) if i not in set(low)]
    for given in _stacked(spans, low, high, sorted({min(plan.buffer_bytes, most_bytes), most_bytes})):
        if given_collision(given) is not None:
            continue
        candidate = best_of_heuristics(given, most_bytes)
        if candidate.height_bytes <= most_bytes:
            moved = _moved(problem, plan, candidate)
            validate(problem, moved)
            return moved
    return None


def _placed(problem: Problem, plan: MemoryPlan) -> tuple[tuple[Span, ...], list[Offset]]:
    """Return a plan's spans and their offsets."""
    spans = spans_of(problem, problem.indices_of(plan.order))
    offsets = [plan.offsets[array.name] for array in problem.planned]
    offsets += [plan.workspace_offsets[operator.name] for _, operator in scratching(problem)]
    return spans, offsets


def _moved(problem: Problem, plan: MemoryPlan, candidate: Candidate) -> MemoryPlan:
    """Return the plan with other offsets."""
    arrays = [array.name for array in problem.planned]
    workspaces = [operator.name for _, operator in scratching(problem)]
    is_as_low = candidate.height_bytes <= plan.buffer_bytes
    return replace(
        plan,
        offsets=dict(zip(arrays, candidate.offsets, strict=False)),
        workspace_offsets=dict(zip(workspaces, candidate.offsets[len(arrays) :], strict=True)),
        buffer_bytes=candidate.height_bytes,
        provenance=replace(
            plan.provenance,
            place_found_by=f"stacked at the ends, {candidate.method}",
            place_proved_by=plan.provenance.place_proved_by if is_as_low else None,
        ),
    )


def _alive_at(spans: Sequence[Span], at: Timestep) -> list[int]:
    return [i for i, span in enumerate(spans) if span.size_bytes and span.lower <= at < span.upper]


def _stacked(
    spans: Sequence[Span], low: Sequence[int], high: Sequence[int], heights: Sequence[Bytes]
) -> Iterator[list[Span]]:
    """Yield the spans with offsets of both stacks, then of one alone, in the sequences and heights to try."""
    keys: tuple[Key, ...] = (last_to_die, first_born)
    pairs: list[tuple[Key | None, Key | None]] = [(key, key) for key in keys] if low and high else []
    one: list[tuple[Key | None, Key | None]] = [(key, None) for key in keys if low]
    one += [(None, key) for key in keys if high]
    for candidates in (pairs, one):
        for height, (low_key, high_key) in itertools.product(heights, candidates):
            given = list(spans)
            offset = 0
            for i in [] if low_key is None else sorted(low, key=lambda i: low_key(spans[i])):
                offset = -(-offset // spans[i].alignment) * spans[i].alignment
                given[i] = replace(spans[i], offset=offset)
                offset += spans[i].size_bytes
            offset = height
            for i in [] if high_key is None else sorted(high, key=lambda i: high_key(spans[i])):
                offset = (offset - spans[i].size_bytes) // spans[i].alignment * spans[i].alignment
                given[i] = replace(spans[i], offset=offset)
            if offset >= 0:
                yield given
