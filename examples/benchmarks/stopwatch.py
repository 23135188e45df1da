"""Times steps in pairs, and loads what is needed before anything is timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from olla_solvers.placer import place_with
from olla_solvers.plan import Span

RESAMPLES = 5000

CROSSED = (Span("a", 2, 4, 1), Span("b", 3, 5, 3), Span("c", 1, 3, 1))
"""Spans that first fit places above the bound, so that the search runs."""


def load_search() -> None:
    """Compile the placement search, or load it: what is timed later then is searching alone."""
    place_with(CROSSED, method="search")


def paired(
    eager: Callable[[], object],
    planned: Callable[[], object],
    eager_first: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Time an eager and a planned step, one right after the other, in seconds of a clock."""
    times = {}
    for run in (eager, planned) if eager_first else (planned, eager):
        started = clock()
        run()
        times[run] = clock() - started
    return times[eager], times[planned]


def bootstrap_interval(ratios: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the median."""
    generator = np.random.default_rng(0)
    samples = generator.choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return float(low), float(high)
