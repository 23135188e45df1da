"""A conflict of the fewest spans, proven to be that: hitting sets against sets that fit.

Spans that fit together say of every conflict that it contains some other span. So the smallest set that has
a span outside each set known to fit is no larger than any conflict: if it does not fit itself, it is a
smallest conflict; if it fits, it grows to as large a set that fits as can be had, and the next smallest set
is asked (implicit hitting sets; for unsatisfiable formulas: Ignatiev, Previti, Liffiton, Marques-Silva,
"Smallest MUS Extraction with Minimal Hitting Set Dualization", CP 2015).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from olla_solvers.plan import Span

MOST_SPANS = 200
"""Of more spans no smallest conflict is looked for."""

MOST_ROUNDS = 400
"""Sets that are asked at most."""

MOST_BRANCHES = 20_000
"""Steps of the search for one smallest hitting set."""

FEWEST_WITH_GAPS = 5
"""Fewer spans, neither aligned nor given, fit wherever the live bytes of every timestep do.

*Proof:* four that are connected and never all alive together are one of these: two triples that share two
spans (these at the bottom, either other one on top), a triple and one more beside a span of it (that span at
the bottom, all else on it), one beside each of three (it at the bottom), or a chain (at the bottom and under
the capacity in turn). Three are a triple or a chain.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A conflict.

    Attributes:
        spans: that do not fit together.
        is_smallest: whether no fewer spans are in conflict.
    """

    spans: tuple[Span, ...]
    is_smallest: bool


def smallest_conflict(
    spans: Sequence[Span], known: Sequence[Span], fits: Callable[[Sequence[Span]], bool | None]
) -> Answer:
    """Find a conflict of the fewest spans.

    Args:
        spans: that do not fit together.
        known: a conflict among them.
        fits: whether some of them fit; None where that is not known.

    Returns:
        The known conflict or one of fewer spans.
    """
    sized = [span for span in spans if span.size_bytes > 0]
    if len(sized) > MOST_SPANS:
        return Answer(tuple(known), False)
    draw = random.Random(len(sized))
    outside: list[frozenset[int]] = []
    fewest = 0
    for _ in range(MOST_ROUNDS):
        chosen: tuple[int, ...] | None = None
        while chosen is None:
            if fewest >= len(known):
                return Answer(tuple(known), True)
            try:
                chosen = hitting_set(outside, fewest)
            except _TooManyBranches:
                return Answer(tuple(known), False)
            if chosen is None:
                fewest += 1
        answer = fits([sized[each] for each in chosen])
        if answer is None:
            break
        if not answer:
            return Answer(tuple(sized[each] for each in chosen), True)
        grown = _grow(sized, chosen, fits, draw)
        outside.append(frozenset(range(len(sized))) - grown)
    return Answer(tuple(known), False)


def hitting_set(sets: Sequence[frozenset[int]], size: int) -> tuple[int, ...] | None:
    """Numbers, one of each set among them.

    Args:
        sets: none of them empty.
        size: most numbers.

    Returns:
        The numbers, or None where no so few will do.
    """
    branches = 0

    def go_on(left: Sequence[frozenset[int]], size: int) -> tuple[int, ...] | None:
        nonlocal branches
        branches += 1
        if branches > MOST_BRANCHES:
            raise _TooManyBranches
        if not left:
            return ()
        smallest = min(left, key=len)
        if size == 0 or not smallest:
            return None
        tried: set[int] = set()
        for each in sorted(smallest, key=lambda one: (-sum(one in other for other in left), one)):
            rest = [other - tried for other in left if each not in other]
            found = go_on(rest, size - 1)
            if found is not None:
                return (each, *found)
            tried.add(each)
        return None

    return go_on(sets, size)


class _TooManyBranches(Exception):
    """The search for a hitting set takes too long."""


def _grow(
    spans: Sequence[Span],
    chosen: Sequence[int],
    fits: Callable[[Sequence[Span]], bool | None],
    draw: random.Random,
) -> frozenset[int]:
    """A set that fits and to which no span was found that may be added, from one that fits."""
    inside = list(chosen)
    others = [each for each in range(len(spans)) if each not in inside]
    draw.shuffle(others)
    parts = [others]
    while parts:
        part = parts.pop()
        if part and fits([spans[each] for each in (*inside, *part)]):
            inside.extend(part)
        elif len(part) > 1:
            half = len(part) // 2
            parts += [part[half:], part[:half]]
    return frozenset(inside)
