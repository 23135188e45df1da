"""Names spans that cannot fit within a capacity together: an irreducible infeasible subset.

Spans that are alive at one timestep and have more bytes than the capacity are the plainest reason; of all
such sets the one with the fewest spans is taken. If no timestep has so many live bytes, but the exact
search proved that nothing fits, spans are left out, half of them first and single ones last (a deletion
filter), as long as the search proves that those that stay do not fit. What is left is irreducible: without
any one of them the others fit, if each such search came to an end. Fewer spans elsewhere may be infeasible
all the same; for some seconds ``smallest.py`` looks for them, and either finds the fewest or proves that
those known are. The error says which of the three is known.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from olla_solvers.errors import InfeasibleError
from olla_solvers.infeasible.smallest import FEWEST_WITH_GAPS, smallest_subset
from olla_solvers.place.bisection import when_compiled
from olla_solvers.place.search import SearchStatus, is_available, search
from olla_solvers.place.task import Effort
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes

NODES_FOR_EACH = 200
"""Nodes that one search of fewer spans may try, for each of them."""

LEAST_NODES = 5000
"""Nodes that it may try in any case."""

SMALLEST_SECONDS = 3.0
"""Time for a smallest infeasible subset, once an irreducible one is known."""


class CannotFitError(InfeasibleError):
    """Proven: some spans do not fit within a capacity together.

    Attributes:
        names: names of these spans.
        is_irreducible: True if without any one of them the others are known to fit.
        is_smallest: True if no fewer spans are infeasible, proven.
    """

    def __init__(
        self, message: str, names: Sequence[str], *, is_irreducible: bool, is_smallest: bool
    ) -> None:
        """Keep what cannot fit."""
        super().__init__(message)
        self.names = tuple(names)
        self.is_irreducible = is_irreducible
        self.is_smallest = is_smallest


@dataclass(frozen=True, slots=True)
class InfeasibleSubset:
    """Spans that do not fit together; the flags are those of :class:`CannotFitError`."""

    spans: tuple[Span, ...]
    is_irreducible: bool
    is_smallest: bool = False

    def refuse(self, capacity: Bytes, reason: str | None = None) -> NoReturn:
        """Raise the error; the reason is a proof by search if none is given."""
        kind = "a smaller part of them may be infeasible, too"
        if self.is_irreducible:
            kind = "irreducible: each part of them fits; fewer others may be infeasible"
        if self.is_smallest:
            kind = "no fewer spans are infeasible together"
        names = [span.name for span in self.spans]
        reason = reason or f" together (proven by exact search; {kind})"
        raise CannotFitError(
            f"{', '.join(map(repr, names))} cannot fit within {capacity} B{reason}",
            names,
            is_irreducible=self.is_irreducible,
            is_smallest=self.is_smallest,
        )


def refuse_impossible(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> None:
    """Refuse a capacity that a given offset or the live bytes of one timestep exceed.

    If offsets are given or aligned, fewer of the live spans may be infeasible than their bytes show, which
    the search then finds out.

    Raises:
        CannotFitError: naming the spans.
    """
    for span in spans:
        if span.offset is not None and span.offset + span.size_bytes > capacity:
            raise CannotFitError(
                f"{span.name!r} is given [{span.offset}, {span.offset + span.size_bytes}), which ends above "
                f"the capacity of {capacity} B",
                [span.name],
                is_irreducible=True,
                is_smallest=True,
            )
    clique = fewest_alive_above(spans, capacity)
    if not clique:
        return
    is_smallest = len(clique) <= (FEWEST_WITH_GAPS if _are_plain(spans) else 1)
    subset = InfeasibleSubset(clique, is_smallest or _are_plain(clique), is_smallest)
    if not is_smallest and is_available():
        effort = when_compiled(effort)
        if not subset.is_irreducible:
            subset = irreducible_subset(clique, capacity, effort)
        subset = _fewest(spans, subset, capacity, effort)
    if set(subset.spans) != set(clique):
        subset.refuse(capacity)
    claim = (
        "no fewer spans are infeasible together"
        if subset.is_smallest
        else "no fewer that are alive together have"
    )
    subset.refuse(
        capacity,
        f": they are alive together at timestep {max(span.lower for span in clique)} and have "
        f"{sum(span.size_bytes for span in clique)} B ({claim})",
    )


def _are_plain(spans: Sequence[Span]) -> bool:
    """Return True if only bytes and lifetimes decide what fits."""
    return all(span.offset is None and span.alignment == 1 for span in spans)


def refuse_proven(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> NoReturn:
    """Name a small subset of spans that do not fit, knowing that all of them do not.

    Raises:
        CannotFitError: always.
    """
    effort = when_compiled(effort)
    _fewest(spans, irreducible_subset(spans, capacity, effort), capacity, effort).refuse(capacity)


def _fewest(
    spans: Sequence[Span], known: InfeasibleSubset, capacity: Bytes, effort: Effort
) -> InfeasibleSubset:
    """Return an infeasible subset of the fewest spans, or the known one."""
    effort = Effort.of(min(SMALLEST_SECONDS, effort.seconds()))

    def fits(part: Sequence[Span]) -> bool | None:
        status = _status(part, capacity, effort)
        return None if status is SearchStatus.TIME_LIMIT else status is SearchStatus.FOUND

    smallest, is_smallest = smallest_subset(spans, known.spans, fits)
    return InfeasibleSubset(smallest, known.is_irreducible or is_smallest, is_smallest)


def fewest_alive_above(spans: Sequence[Span], capacity: Bytes) -> tuple[Span, ...]:
    """Return the fewest spans that are alive at one timestep and have more bytes than a capacity.

    Args:
        spans: rectangles.
        capacity: bytes.

    Returns:
        The spans, largest first; none if no timestep has that many live bytes.
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
                best = [alive_index for _, alive_index in alive[:count]]
    return tuple(spans[index] for index in best)


def irreducible_subset(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> InfeasibleSubset:
    """Leave out spans as long as the rest provably does not fit.

    Args:
        spans: rectangles that do not fit.
        capacity: bytes.
        effort: cost that the searches may have.

    Returns:
        The spans that stay; irreducible if each search of fewer came to an end.
    """
    kept = [span for span in spans if span.size_bytes > 0]
    part = max(1, len(kept) // 2)
    while True:
        is_irreducible, position = True, 0
        while position < len(kept):
            fewer = kept[:position] + kept[position + part :]
            status = _status(fewer, capacity, effort)
            if status is SearchStatus.INFEASIBLE:
                kept = fewer
            else:
                is_irreducible = is_irreducible and status is SearchStatus.FOUND
                position += part
        if part == 1:
            return InfeasibleSubset(tuple(kept), is_irreducible)
        part = max(1, part // 2)


def _status(spans: Sequence[Span], capacity: Bytes, effort: Effort) -> SearchStatus:
    if not spans:
        return SearchStatus.FOUND
    if effort.seconds() <= 0:
        return SearchStatus.TIME_LIMIT
    limit = max(LEAST_NODES, NODES_FOR_EACH * len(spans))
    return search(spans, capacity, time_limit=effort.seconds(), node_limit=limit).status
