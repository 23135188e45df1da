"""Runs the compiled search: order after order, with a look at the clock in between.

numba compiles the search when it first runs, once in some ten seconds, and finds it in its cache on disk in
every later process. It is loaded then, and not before; the compilation counts towards no time limit.
"""

from __future__ import annotations

import atexit
import enum
import importlib.util
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.place.search import layout
from olla_solvers.place.search.instance import Prepared, prepare
from olla_solvers.place.search.layout import Ints
from olla_solvers.place.search.portfolio import attempts
from olla_solvers.place.search.rules import SearchRules
from olla_solvers.plan import Span
from olla_solvers.problem import Bytes, Offset

if TYPE_CHECKING:
    from olla_solvers.place.search.search_thread import Limits

_LOGGER = logging.getLogger(__name__)

INSTALL = "pip install 'olla-fx[search]'"
"""The command that installs numba."""

KNOWN_FAILURES = 1 << 18
"""Components that are remembered to have failed; a power of 2."""

_COMPILED = "olla_solvers.place.search.search_thread"
"""The module that imports all that is compiled."""

_LONG_COMPILATION = 4.0
"""Seconds of loading from which on it is logged."""


class SearchStatus(enum.StrEnum):
    """The end of a search."""

    FOUND = "found"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        status: how it ended; ``INFEASIBLE`` is a proof.
        offsets: one for each span, or None if none was found.
        nodes: placements tried.
        attempts: turns that orders had.
        order: the one that ended the search.
        seconds: wall-clock time, without compilation.
        work: steps of work, some fifty million in a second.
    """

    status: SearchStatus
    offsets: tuple[Offset, ...] | None
    nodes: int
    attempts: int
    order: str
    seconds: float
    work: int


def is_available() -> bool:
    """Return True if numba, which compiles the search, is installed."""
    return importlib.util.find_spec("numba") is not None


@cache
def compilation_seconds() -> float:
    """Make the compiled search ready, and return the seconds: some ten, or 0.2 from the cache.

    Raises:
        SolverUnavailableError: if numba is not installed.
    """
    if not is_available():
        raise SolverUnavailableError(
            f"the exact search of placements needs numba; install it with: {INSTALL}"
        )
    start = time.monotonic()
    load_compiled()
    from olla_solvers.place.search.search_thread import Limits

    rules = SearchRules()
    _run(prepare((Span("a", 0, 2, 1), Span("b", 1, 3, 1)), 2, rules), rules, Limits(), 0)
    seconds = time.monotonic() - start
    if seconds > _LONG_COMPILATION:
        _LOGGER.warning("compiled the placement search in %.0f s; it is kept for later processes", seconds)
    return seconds


def load_compiled() -> None:
    """Import the compiled parts, if need be with a cache that lasts as long as this process.

    numba refuses to decorate a function whose cache it can write neither beside the source nor in the home
    folder, as in a container that is read-only.
    """
    try:
        import_module(_COMPILED)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        config: Any = import_module("numba.core.config")
        folder = tempfile.mkdtemp(prefix="olla_solvers_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _LOGGER.warning("no folder keeps the compiled search; set NUMBA_CACHE_DIR to one (%s)", error)
        before, config.CACHE_DIR = config.CACHE_DIR, folder
        try:
            import_module(_COMPILED)
        finally:
            config.CACHE_DIR = before


def is_compiled() -> bool:
    """Return True if the search was compiled on this machine before, so that it is ready in a moment."""
    load_compiled()
    from olla_solvers.place.search import kernel

    return any(Path(kernel.run.stats.cache_path or ".").glob("kernel.run-*.nbc"))


def compilation_so_far() -> float:
    """Return the seconds that making the search ready has cost this process; 0 if it was not needed yet."""
    return compilation_seconds() if compilation_seconds.cache_info().currsize else 0.0


def search(
    spans: Sequence[Span],
    capacity_bytes: Bytes,
    *,
    time_limit: float | None = None,
    node_limit: int | None = None,
    work_limit: int | None = None,
    rules: SearchRules | None = None,
    random_orders: int = 0,
) -> SearchResult:
    """Place spans within a capacity, or prove that it cannot be done.

    Without a time limit the result depends on the arguments alone.

    Args:
        spans: rectangles; those with an offset keep it.
        capacity_bytes: room for all.
        time_limit: seconds; None for no limit.
        node_limit: most placements to try; None for no limit.
        work_limit: most steps of work, see :class:`SearchResult`; None for no limit.
        rules: which pruning rules to use; None for all.
        random_orders: number of random orders in a round of turns.

    Returns:
        Offsets, a proof that there are none, or neither in the time.

    Raises:
        SolverUnavailableError: if numba is not installed.
    """
    compilation_seconds()
    start = time.monotonic()
    rules = SearchRules() if rules is None else rules
    prepared = prepare(spans, capacity_bytes, rules)
    if prepared.contradictory:
        return SearchResult(SearchStatus.INFEASIBLE, None, 0, 0, "given offsets", 0.0, 0)
    if len(prepared.spans) == 0:
        offsets = _offsets(spans, prepared, prepared.low)
        return SearchResult(SearchStatus.FOUND, offsets, 0, 0, "no choice", 0.0, 0)
    from olla_solvers.place.search.search_thread import Limits

    deadline = None if time_limit is None else start + time_limit
    limits = Limits(deadline, node_limit, work_limit)
    result, low = _run(prepared, rules, limits, random_orders)
    answer = None if low is None else _offsets(spans, prepared, low)
    return replace(result, offsets=answer, seconds=time.monotonic() - start)


def _run(
    prepared: Prepared, rules: SearchRules, limits: Limits, random_orders: int
) -> tuple[SearchResult, Ints | None]:
    """Give the orders their turns; return the result without offsets, and these."""
    from olla_solvers.place.search.search_thread import SearchThread

    failed = np.zeros((KNOWN_FAILURES, 3), dtype=np.int64)
    threads: dict[int | None, SearchThread] = {}
    nodes, work, turns = 0, 0, 0
    for attempt in attempts(prepared, random_orders):
        if attempt.thread not in threads:
            threads[attempt.thread] = SearchThread(prepared, rules, failed)
        thread = threads[attempt.thread]
        others = nodes - thread.nodes, work - thread.work
        outcome = thread.proceed(attempt, limits, others)
        turns += 1
        nodes, work = thread.nodes + others[0], thread.work + others[1]
        if outcome == layout.FOUND:
            return SearchResult(SearchStatus.FOUND, None, nodes, turns, attempt.name, 0.0, work), thread.low
        if outcome == layout.EXHAUSTED:
            return SearchResult(SearchStatus.INFEASIBLE, None, nodes, turns, attempt.name, 0.0, work), None
        if limits.are_met(nodes, work):
            break
    return SearchResult(SearchStatus.TIME_LIMIT, None, nodes, turns, "none", 0.0, work), None


def _offsets(spans: Sequence[Span], prepared: Prepared, low: Ints) -> tuple[Offset, ...]:
    """Return the offsets of all spans."""
    offsets = [0 if span.offset is None else span.offset for span in spans]
    for index, offset in zip(prepared.spans, low, strict=True):
        offsets[index] = int(offset)
    return tuple(offsets)
