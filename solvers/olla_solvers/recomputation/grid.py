"""Keeps what crosses a few cuts of forward, and makes all else again: segments, as starts for a search.

Chen et al. ("Training deep nets with sublinear memory cost") keep the results at the ends of segments of a
chain. In any graph, what is kept are the arrays that are made before a cut and read by forward after it; the
cuts share out the bytes that forward makes evenly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from olla_solvers.problem import Timestep
from olla_solvers.recomputation.evaluate import States
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.walk import KEPT

SEGMENTS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256)
"""Numbers of cuts."""


def segmented(instance: Instance, dropped: States) -> Iterator[States]:
    """Go through states that keep what crosses cuts, from few cuts to many.

    Args:
        instance: the step.
        dropped: the states of what does not cross.
    """
    spans = _spans(instance)
    sizes = [sum(instance.flat.array_bytes[array] for array in arrays) for arrays in instance.units.arrays]
    units = sorted(range(len(spans)), key=lambda unit: (spans[unit], unit))
    made = list(accumulate(sizes[unit] for unit in units))
    before: States = []
    for count in SEGMENTS:
        if not made or count >= len(units):
            return
        places = {bisect_right(made, made[-1] * cut // (count + 1)) for cut in range(1, count + 1)}
        cuts = sorted({spans[units[min(place, len(units) - 1)]][0] for place in places})
        states = [
            KEPT if bisect_right(cuts, last) > bisect_right(cuts, first) else dropped[unit]
            for unit, (first, last) in enumerate(spans)
        ]
        if states != before:
            yield states
        before = states


def _spans(instance: Instance) -> list[tuple[Timestep, Timestep]]:
    """Return for each unit the timesteps at which it is made, and last read in its phase."""
    position = {operator: timestep for timestep, operator in enumerate(instance.problem.order)}
    arrays = instance.problem.problem.arrays
    result = []
    for operators, made in zip(instance.units.operators, instance.units.arrays, strict=True):
        readers = [
            position[reader]
            for array in made
            for reader in arrays[array].consumers
            if instance.problem.phases[reader] == instance.problem.phases[operators[0]]
        ]
        first = position[operators[0]]
        result.append((first, max(readers, default=first)))
    return result
