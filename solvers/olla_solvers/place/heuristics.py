"""Runs the fast heuristics one after another, until one reaches the goal.

The skyline of the profile-guided allocation paper under three rules; if offsets are given, greedy by size
first. Each skyline reaches the bound on recorded training steps that those before it leave above.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from olla_solvers.effort.progress import ProgressLog
from olla_solvers.place.greedy import by_size, greedy
from olla_solvers.place.skyline import earliest_birth, largest_area, longest_lifetime, reversed_time, skyline
from olla_solvers.place.task import Candidate
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset


def best_of_heuristics(
    spans: Sequence[Span], goal_bytes: Bytes, *, passes: int = 9, log: ProgressLog | None = None
) -> Candidate:
    """Return the lowest placement of the fast heuristics, or the first that reaches the goal.

    Args:
        spans: checked rectangles.
        goal_bytes: a height that is low enough.
        passes: most heuristics to run, at least 1.
        log: notes lower placements.
    """
    name, run = next(heuristics := _heuristics(spans))
    best = Candidate.of(spans, run(), name)
    for name, run in itertools.islice(heuristics, passes - 1):
        if log is not None:
            log.note(best.height_bytes, 0, best.method)
        if best.height_bytes <= goal_bytes:
            return best
        best = best.or_lower(Candidate.of(spans, run(), name))
    return best


def _heuristics(spans: Sequence[Span]) -> Iterator[tuple[str, Callable[[], tuple[Offset, ...]]]]:
    """Yield the name of each heuristic, and a function that runs it."""
    if any(span.offset is not None for span in spans):
        yield "greedy by size, first fit", partial(greedy, spans, by_size)
    yield "skyline:longest lifetime", partial(skyline, spans, longest_lifetime)
    yield (
        "skyline:earliest birth, longest lifetime, time reversed",
        lambda: skyline(reversed_time(spans), earliest_birth),
    )
    yield "skyline:largest area", partial(skyline, spans, largest_area)
