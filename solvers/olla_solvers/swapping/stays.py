"""Where in an order arrays are elsewhere, for planning what is made again around what is swapped."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

from olla_solvers.recomputation.problem import ArrayIndex, Stay
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.schedule import places
from olla_solvers.swapping.timeline import Timeline
from olla_solvers.swapping.transfers import Link


def stays_of(
    line: Timeline, gaps: Sequence[Gap], link: Link, lent: Collection[ArrayIndex] = ()
) -> tuple[Stay, ...]:
    """Return which arrays are elsewhere between which positions of the order if some are swapped.

    Args:
        line: of the gaps.
        gaps: what is swapped, without stalls.
        link: which copies.
        lent: arrays that may be elsewhere more than once.
    """
    own = [timestep for timestep, execution in enumerate(line.executions) if not execution.copy]
    # A position begins with what runs again for its operator.
    began = [0, *(timestep + 1 for timestep in own[:-1])]
    length = len(line.executions)
    began += [timestep + length for timestep in began]
    stays: dict[ArrayIndex, list[Stay]] = {}
    for gap, (gone, back) in zip(gaps, places(line, gaps, link), strict=True):
        stay = Stay(gap.array, bisect_left(began, gone), bisect_right(began, back) - 1)
        if stay.gone_before < stay.back_from:
            stays.setdefault(gap.array, []).append(stay)
    return tuple(
        stay
        for array in sorted(stays)
        for stay in (stays[array] if array in lent else [max(stays[array], key=_positions)])
    )


def _positions(stay: Stay) -> int:
    return stay.back_from - stay.gone_before
