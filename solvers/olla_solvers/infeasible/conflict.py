"""Why spans cannot fit within a capacity: a smallest set of them that cannot fit together.

Spans that are alive at one timestep and have more bytes than the capacity are the plainest reason; of all
such sets the one with the fewest spans is taken. Where no timestep has so many live bytes, but the exact
search proved that nothing fits, spans are left out, half of them first and single ones last, as long as the
search can prove that those that stay do not fit. What is left is minimal: without any one of them the others
fit, where each such search came to an end. Fewer spans elsewhere may be in conflict all the same; for some
seconds ``smallest.py`` looks for them, and either finds the fewest or proves that those known are. The error
says which of the three is known.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from typing import NoReturn

from olla_solvers.errors import InfeasibleError
from olla_solvers.infeasible.smallest import FEWEST_WITH_GAPS, smallest_conflict
from olla_solvers.place.bisection import Effort, when_compiled
from olla_solvers.place.search import SearchStatus, is_available, search
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes

NODES_FOR_EACH = 200
"""Nodes that one search of fewer spans may try, for each of them."""

LEAST_NODES = 5000
"""Nodes that it may try in any case."""

SMALLEST_SECONDS = 3.0
"""Time for a smallest conflict, once one is known."""


class CannotFitError(InfeasibleError):
    """Proven: some spans do not fit within a capacity together.

    Attributes:
        names: of these spans.
        is_minimal: whether without any one of them the others are known to fit.
        is_smallest: whether it is known that no fewer spans are in conflict.
    """

    def __init__(self, message: str, names: Sequence[str], *, is_minimal: bool, is_smallest: bool) -> None:
        """Say what cannot fit."""
        super().__init__(message)
        self.names = tuple(names)
        self.is_minimal = is_minimal
        self.is_smallest = is_smallest


def refuse_impossible(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> None:
    """Refuse a capacity that a given offset or the live bytes of one timestep exceed.

    Where offsets are given or aligned, fewer of the live spans may be in conflict than their bytes show,
    which the search then finds out.

    Raises:
        CannotFitError: naming the spans.
    """
    for span in spans:
        if span.offset is not None and span.offset + span.size_bytes > capacity:
            raise CannotFitError(
                f"{span.name!r} is given [{span.offset}, {span.offset + span.size_bytes}), which ends above "
                f"the capacity of {capacity} B",
                [span.name],
                is_minimal=True,
                is_smallest=True,
            )
    clique = fewest_alive_above(spans, capacity)
    if not clique:
        return
    kept: Sequence[Span] = clique
    is_minimal = _are_plain(clique)
    is_smallest = len(clique) <= (FEWEST_WITH_GAPS if _are_plain(spans) else 1)
    if not is_smallest and is_available():
        effort = when_compiled(effort)
        if not is_minimal:
            kept, is_minimal = minimal_conflict(clique, capacity, effort)
        kept, is_minimal, is_smallest = _fewest(spans, kept, is_minimal, capacity, effort)
    if set(kept) != set(clique):
        _refuse(kept, capacity, is_minimal, is_smallest)
    live_bytes = sum(span.size_bytes for span in clique)
    raise CannotFitError(
        f"{_names(clique)} cannot fit within {capacity} B: they are alive together at timestep "
        f"{max(span.lower for span in clique)} and have {live_bytes} B "
        f"({'no fewer spans are in conflict' if is_smallest else 'no fewer that are alive together have'})",
        [span.name for span in clique],
        is_minimal=is_minimal or is_smallest,
        is_smallest=is_smallest,
    )


def _are_plain(spans: Sequence[Span]) -> bool:
    """Whether only bytes and lifetimes decide what fits."""
    return all(span.offset is None and span.alignment == 1 for span in spans)


def refuse_proven(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> NoReturn:
    """Name a small set of spans that do not fit, knowing that all of them do not.

    Raises:
        CannotFitError: always.
    """
    kept, is_minimal = minimal_conflict(spans, capacity, effort)
    kept_fewest, is_minimal, is_smallest = _fewest(spans, kept, is_minimal, capacity, effort)
    _refuse(kept_fewest, capacity, is_minimal, is_smallest)


def _fewest(
    spans: Sequence[Span], known: Sequence[Span], is_minimal: bool, capacity: Bytes, effort: Effort
) -> tuple[Sequence[Span], bool, bool]:
    """A conflict of the fewest spans or the known one, and whether it is minimal, and smallest."""
    effort = Effort(time.monotonic() + min(SMALLEST_SECONDS, max(0.0, effort.seconds())), None)

    def fits(some: Sequence[Span]) -> bool | None:
        status = _status(some, capacity, effort)
        return None if status is SearchStatus.TIME_LIMIT else status is SearchStatus.FOUND

    answer = smallest_conflict(spans, known, fits)
    return answer.spans, is_minimal or answer.is_smallest, answer.is_smallest


def _refuse(kept: Sequence[Span], capacity: Bytes, is_minimal: bool, is_smallest: bool) -> NoReturn:
    kind = "a smaller part of them may be in conflict"
    if is_minimal:
        kind = "no part of them is in conflict, fewer others may be"
    if is_smallest:
        kind = "no fewer spans are in conflict"
    raise CannotFitError(
        f"{_names(kept)} cannot fit within {capacity} B together (proven by exact search; {kind})",
        [span.name for span in kept],
        is_minimal=is_minimal,
        is_smallest=is_smallest,
    )


def fewest_alive_above(spans: Sequence[Span], capacity: Bytes) -> list[Span]:
    """The fewest spans that are alive at one timestep and have more bytes than a capacity.

    Args:
        spans: rectangles.
        capacity: bytes.

    Returns:
        The spans, largest first; none where no timestep has that many live bytes.
    """
    events = sorted(
        [(span.upper, 0, index) for index, span in enumerate(spans)]
        + [(span.lower, 1, index) for index, span in enumerate(spans)]
    )
    alive: list[tuple[int, int]] = []
    live_bytes = 0
    best: list[int] = []
    for _, is_birth, index in events:
        entry = (-spans[index].size_bytes, index)
        if not is_birth:
            alive.remove(entry)
            live_bytes -= spans[index].size_bytes
            continue
        insort(alive, entry)
        live_bytes += spans[index].size_bytes
        if live_bytes > capacity:
            count, total = 0, 0
            while total <= capacity:
                total -= alive[count][0]
                count += 1
            if not best or count < len(best):
                best = [number for _, number in alive[:count]]
    return [spans[number] for number in best]


def minimal_conflict(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> tuple[tuple[Span, ...], bool]:
    """Leave out spans as long as the rest provably does not fit.

    Args:
        spans: rectangles that do not fit.
        capacity: bytes.
        effort: what it may cost.

    Returns:
        The spans that stay, and whether it is known that the others fit without any one of them.
    """
    kept = [span for span in spans if span.size_bytes > 0]
    part = max(1, len(kept) // 2)
    while True:
        is_minimal, position = True, 0
        while position < len(kept):
            fewer = kept[:position] + kept[position + part :]
            status = _status(fewer, capacity, effort)
            if status is SearchStatus.INFEASIBLE:
                kept = fewer
            else:
                is_minimal = is_minimal and status is SearchStatus.FOUND
                position += part
        if part == 1:
            return tuple(kept), is_minimal
        part = max(1, part // 2)


def _status(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> SearchStatus:
    if not spans:
        return SearchStatus.FOUND
    if effort.seconds() <= 0:
        return SearchStatus.TIME_LIMIT
    limit = max(LEAST_NODES, NODES_FOR_EACH * len(spans))
    return search(spans, capacity, time_limit=effort.seconds(), node_limit=limit).status


def _names(spans: Sequence[Span]) -> str:
    return ", ".join(repr(span.name) for span in spans)
