"""Finds an infeasible subset of the fewest spans, and proves it: hitting sets of the sets that do not fit.

If some spans fit together, every infeasible subset contains another span. So the smallest set with a span
outside each set known to fit is no larger than any infeasible subset: if it does not fit itself, it is a
smallest one; if it fits, it is enlarged as long as it fits, and the next smallest set is tried (implicit
hitting sets; for unsatisfiable formulas: Ignatiev, Previti, Liffiton, Marques-Silva, "Smallest MUS Extraction
with Minimal Hitting Set Dualization", CP 2015).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from olla_solvers.plan import Span

MOST_SPANS = 200
"""Of more spans no smallest infeasible subset is looked for."""

MOST_ROUNDS = 400
"""Most sets that are tried."""

MOST_BRANCHES = 20_000
"""Most steps of the search for one smallest hitting set."""

FEWEST_WITH_GAPS = 5
"""Fewer spans, neither aligned nor given, fit if the live bytes of every timestep do.

*Proof:* four that are connected and never all alive together are one of these: two triples that share two
spans (these at the bottom, either other one on top), a triple and one more beside a span of it (that span at
the bottom, all else on it), one beside each of three (it at the bottom), or a chain (at the bottom and under
the capacity in turn). Three are a triple or a chain.
"""


def smallest_subset(
    spans: Sequence[Span], known: Sequence[Span], fits: Callable[[Sequence[Span]], bool | None]
) -> tuple[tuple[Span, ...], bool]:
    """Find an infeasible subset of the fewest spans.

    Args:
        spans: that do not fit together.
        known: an infeasible subset of them.
        fits: tells of some spans if they fit; None if that is not known.

    Returns:
        The known subset or one of fewer spans, and True if no fewer spans are infeasible.
    """
    sized = [span for span in spans if span.size_bytes > 0]
    if len(sized) > MOST_SPANS:
        return tuple(known), False
    draw = random.Random(len(sized))
    outside: list[frozenset[int]] = []
    fewest = 0
    for _ in range(MOST_ROUNDS):
        chosen: tuple[int, ...] | None = None
        while chosen is None:
            if fewest >= len(known):
                return tuple(known), True
            try:
                chosen = hitting_set(outside, fewest)
            except _TooManyBranches:
                return tuple(known), False
            if chosen is None:
                fewest += 1
        subset = tuple(sized[index] for index in chosen)
        answer = fits(subset)
        if answer is None:
            break
        if not answer:
            return subset, True
        outside.append(frozenset(range(len(sized))) - _grow(sized, chosen, fits, draw))
    return tuple(known), False


def hitting_set(sets: Sequence[frozenset[int]], size: int) -> tuple[int, ...] | None:
    """Return numbers of which each set contains one, or None if that takes more.

    Args:
        sets: none of them empty.
        size: most numbers.
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
        for number in sorted(smallest, key=lambda number: (-sum(number in other for other in left), number)):
            rest = go_on([other - tried for other in left if number not in other], size - 1)
            if rest is not None:
                return (number, *rest)
            tried.add(number)
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
    """Return a set that fits and contains the chosen one; no span is known that fits with it, too."""
    inside = list(chosen)
    others = [index for index in range(len(spans)) if index not in inside]
    draw.shuffle(others)
    parts = [others]
    while parts:
        part = parts.pop()
        if part and fits([spans[index] for index in (*inside, *part)]):
            inside.extend(part)
        elif len(part) > 1:
            half = len(part) // 2
            parts += [part[half:], part[:half]]
    return frozenset(inside)
