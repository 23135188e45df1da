"""Helpers of placement tests: the independent validator, exhaustive enumeration, random instances."""

from __future__ import annotations

import random
from collections.abc import Sequence

from olla_solvers.plan import MemoryPlan, Provenance, SolverReport, Span
from olla_solvers.problem import Array, Operator, Problem
from olla_solvers.spans import max_live_bytes
from olla_solvers.validate import validate


def assert_valid(items: Sequence[Span], offsets: Sequence[int]) -> None:
    """Let the validator, which shares no code with the planners, check a placement; given offsets besides."""
    start = min((span.lower for span in items), default=0)
    end = max((span.upper for span in items), default=0)
    operators = tuple(Operator(str(t)) for t in range(start, end))
    arrays = tuple(
        Array(
            span.name,
            span.size_bytes,
            span.lower - start,
            () if span.upper == span.lower + 1 else (span.upper - 1 - start,),
            alignment=span.alignment,
        )
        for span in items
    )
    problem = Problem(operators, arrays, tuple((t, t + 1) for t in range(end - start - 1)))
    tops = [offset + span.size_bytes for span, offset in zip(items, offsets, strict=True)]
    live = [sum(span.size_bytes for span in items if span.lower <= t < span.upper) for t in range(start, end)]
    none = SolverReport("none")
    validate(
        problem,
        MemoryPlan(
            order=tuple(operator.name for operator in operators),
            offsets={span.name: offset for span, offset in zip(items, offsets, strict=True)},
            workspace_offsets={},
            buffer_bytes=max(tops, default=0),
            peak_bytes=max(live, default=0),
            lower_bound_bytes=0,
            provenance=Provenance("", None, none, "", None, none),
        ),
    )
    for span, offset in zip(items, offsets, strict=True):
        assert span.offset in (None, offset)


def lowest_height(items: Sequence[Span]) -> int:
    """The smallest height over all sequences of first-fit placements, which contain a lowest one."""
    sized = [span for span in items if span.size_bytes]
    fixed = [(span, span.offset) for span in sized if span.offset is not None]
    top = max((span.offset + span.size_bytes for span in items if span.offset is not None), default=0)
    best = top + sum(span.size_bytes + span.alignment for span in sized)
    bound = max_live_bytes(items)

    def go_on(placed: list[tuple[Span, int]], waiting: list[Span], height: int) -> None:
        nonlocal best
        if height >= best or best == bound:
            return
        if not waiting:
            best = height
            return
        for span in waiting:
            offset = _lowest_fit(span, placed)
            rest = [other for other in waiting if other is not span]
            go_on([*placed, (span, offset)], rest, max(height, offset + span.size_bytes))

    go_on(list(fixed), [span for span in sized if span.offset is None], top)
    return best


def _lowest_fit(span: Span, placed: Sequence[tuple[Span, int]]) -> int:
    others = [
        (offset, offset + other.size_bytes)
        for other, offset in placed
        if other.lower < span.upper and span.lower < other.upper
    ]
    for offset in sorted({0, *(-(-end // span.alignment) * span.alignment for _, end in others)}):
        if all(offset + span.size_bytes <= start or end <= offset for start, end in others):
            return offset
    raise AssertionError("the topmost end always fits")


def random_instance(draw: random.Random) -> tuple[Span, ...]:
    """Up to 8 spans that fit tightly: few sizes, long overlaps; some aligned, some given."""
    count, end = draw.randint(2, 8), draw.randint(3, 8)
    aligned, given = draw.random() < 0.35, draw.random() < 0.25
    sizes = draw.choice([(1, 2, 3), (2, 3, 5, 7), (4, 6, 10), (1, 5, 8, 13)])
    items = []
    for number in range(count):
        lower = draw.randrange(end)
        upper = draw.randint(lower + 1, end)
        alignment = draw.choice((1, 2, 4)) if aligned else 1
        items.append(Span(f"s{number}", lower, upper, draw.choice(sizes), alignment))
    if given:
        first = items[0]
        offset = first.alignment * draw.randint(0, 4)
        items[0] = Span(first.name, first.lower, first.upper, first.size_bytes, first.alignment, offset)
    return tuple(items)
