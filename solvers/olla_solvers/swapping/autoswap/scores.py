"""The four priority scores of AutoSwap (section IV-B): the larger, the better an array is to swap.

Beside an array's size they look at how long it can be away, and at how much is on the device meanwhile.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from olla_solvers.recomputation.problem import Seconds
from olla_solvers.swapping.gaps import Gap, Loads, remove
from olla_solvers.swapping.timed_step import Moments, TimedStep
from olla_solvers.swapping.transfers import Link

Values: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
"""A number for each candidate."""


class Score(enum.StrEnum):
    """What a candidate is judged by, with the paper's abbreviations."""

    AREA = "aoa"
    DURATION = "doa"
    WEIGHTED = "wdoa"
    SUBMODULAR = "swdoa"


def all_scores(step: TimedStep, gaps: Sequence[Gap], link: Link) -> Mapping[Score, Values]:
    """Return each candidate's value by each score.

    Args:
        step: whose candidates these are.
        gaps: the candidates.
        link: which copies.
    """
    durations = np.array([duration_of_absence(step, gap, link) for gap in gaps], dtype=np.float64)
    areas = [area_of_absence(duration, gap) for duration, gap in zip(durations, gaps, strict=True)]
    return {
        Score.AREA: np.array(areas, dtype=np.float64),
        Score.DURATION: durations,
        Score.WEIGHTED: weighted_durations(step, step.load_bytes, gaps),
        Score.SUBMODULAR: submodular_durations(step, gaps),
    }


def duration_of_absence(step: TimedStep, gap: Gap, link: Link) -> Seconds:
    """Return the seconds between two accesses less those of both copies; negative if these take longer."""
    between = step.begins[gap.back_before] - step.begins[gap.out_after + 1]
    return float(between - link.out_seconds(gap.size_bytes) - link.in_seconds(gap.size_bytes))


def area_of_absence(duration: Seconds, gap: Gap) -> float:
    """Return duration of absence times size; if it is negative, divided by size.

    So among arrays that the link is too slow for, a large one has a larger area than a small one.
    """
    return float(duration * gap.size_bytes if duration >= 0 else duration / gap.size_bytes)


def weighted_durations(step: TimedStep, load: Loads, gaps: Sequence[Gap]) -> Values:
    """Return for each candidate the area under a load between its two accesses.

    Args:
        step: whose candidates these are.
        load: of each timestep.
        gaps: the candidates.
    """
    areas = _areas(step, load)
    return np.array([areas[gap.back_before] - areas[gap.out_after + 1] for gap in gaps], dtype=np.float64)


def submodular_durations(step: TimedStep, gaps: Sequence[Gap]) -> Values:
    """Return for each candidate the area under the load that those chosen before it leave.

    The one with the largest area is chosen and leaves the load, and so on.
    """
    values = np.zeros(len(gaps))
    firsts = np.array([gap.out_after + 1 for gap in gaps], dtype=np.int64)
    seconds = np.array([gap.back_before for gap in gaps], dtype=np.int64)
    is_left = np.ones(len(gaps), dtype=bool)
    load = step.load_bytes.copy()
    for _ in gaps:
        areas = _areas(step, load)
        between = np.where(is_left, areas[seconds] - areas[firsts], -np.inf)
        chosen = int(between.argmax())
        values[chosen] = between[chosen]
        is_left[chosen] = False
        gap = gaps[chosen]
        remove(load, gap.out_after + 1, gap.back_before, gap.size_bytes)
    return values


def standardised(values: Values) -> Values:
    """Return values with mean 0 and standard deviation 1; zeros if all are equal."""
    deviation = values.std() if len(values) else 0.0
    return (values - values.mean()) / deviation if deviation > 0 else np.zeros(len(values))


def _areas(step: TimedStep, load: Loads) -> Moments:
    """Return the area under a load up to each boundary of this step and the next."""
    return np.concatenate([[0.0], np.cumsum(np.tile(load * np.array(step.durations), 2))])
