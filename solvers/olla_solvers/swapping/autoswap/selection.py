"""Selects candidates by priority until the load is within its limit (AutoSwap, section IV-D)."""

from __future__ import annotations

from collections.abc import Sequence

from olla_solvers.problem import Bytes
from olla_solvers.swapping.gaps import Gap, remove
from olla_solvers.swapping.timed_step import TimedStep


def select(
    step: TimedStep, gaps: Sequence[Gap], priorities: Sequence[float], limit_bytes: Bytes
) -> tuple[Gap, ...]:
    """Return the candidates of highest priority, as many as the limit takes.

    Args:
        step: whose candidates these are.
        gaps: the candidates.
        priorities: of each; of equal ones, the first candidate comes first.
        limit_bytes: of the load, if what is selected is away as long as it can be.

    Returns:
        All candidates, if they do not do.
    """
    load = step.load_bytes.copy()
    selected: list[Gap] = []
    for index in sorted(range(len(gaps)), key=lambda index: -priorities[index]):
        if load.max(initial=0) <= limit_bytes:
            break
        gap = gaps[index]
        remove(load, gap.out_after + 1, gap.back_before, gap.size_bytes)
        selected.append(gap)
    return tuple(selected)
