"""The fast methods one after another, until one reaches the goal.

The skyline of the profile-guided allocation paper under six tie-breaks, with time running either way; where
offsets are given, greedy by size besides. Which pass comes first follows from what each reaches on recorded
training steps, not from any one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from olla_solvers.place.candidate import Found, lower_of
from olla_solvers.place.greedy import by_size, greedy
from olla_solvers.place.skyline import RULES, reversed_time, skyline
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset
from olla_solvers.progress import ProgressLog

SEQUENCE = (
    ("longest lifetime", False),
    ("earliest birth, longest lifetime", True),
    ("largest area", False),
    ("earliest birth, longest lifetime", False),
    ("longest lifetime, largest", True),
    ("largest area", True),
    ("longest lifetime, largest", False),
    ("longest lifetime", True),
    ("longest lifetime, smallest", False),
    ("longest lifetime, smallest", True),
    ("largest size, longest lifetime", False),
    ("largest size, longest lifetime", True),
)
"""Rules, and whether time is reversed, in the sequence of trial."""


def best_of_heuristics(
    spans: Sequence[Span],
    goal_bytes: Bytes,
    *,
    best: Found | None = None,
    first: int = 0,
    last: int = 99,
    log: ProgressLog | None = None,
) -> Found:
    """The lowest placement of the fast methods, or the first that reaches the goal.

    Args:
        spans: checked rectangles.
        goal_bytes: a height that is low enough.
        best: what is known already.
        first: number of the pass to begin with.
        last: number of the pass to stop before.
        log: where lower placements are noted.

    Returns:
        The best placement found or known.
    """
    for position, (method, offsets) in enumerate(_passes(spans)):
        if position >= last or (best is not None and best.height_bytes <= goal_bytes):
            break
        if position >= first:
            best = lower_of(best, Found.of(spans, offsets(), method)) or best
            if log is not None and best is not None:
                log.note(best.height_bytes, 0, best.method)
    return best or Found((), 0, "none")


def _passes(spans: Sequence[Span]) -> Iterator[tuple[str, Callable[[], tuple[Offset, ...]]]]:
    """Every fast method's name, and how to run it."""
    if any(span.offset is not None for span in spans):
        yield "greedy by size, first fit", partial(greedy, spans, by_size)
        yield "greedy by size, best fit", partial(greedy, spans, by_size, best_fit=True)
    backwards = reversed_time(spans)
    for name, is_reversed in SEQUENCE:
        turned = backwards if is_reversed else spans
        label = f"skyline:{name}{', time reversed' if is_reversed else ''}"
        yield label, partial(skyline, turned, RULES[name])
