"""Drops what takes fewest seconds per byte to make again, as a start of the search.

Chen et al., "Training deep nets with sublinear memory cost" (2016), §4.2, drop the results of operations of
low cost (:mod:`olla_solvers.recomputation.published.low_cost`). Where many results cost the same, it meets a
budget to the byte, which corners of a curve and segments do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from olla_solvers.recomputation.evaluate import States, states_of
from olla_solvers.recomputation.instance import Instance
from olla_solvers.recomputation.units import Unit
from olla_solvers.recomputation.walk import KEPT


def rates(instance: Instance) -> list[float]:
    """Return for each unit the seconds of its repetition per byte of its arrays."""
    result = []
    for arrays, seconds in zip(instance.units.arrays, instance.units.seconds, strict=True):
        size = sum(instance.flat.array_bytes[array] for array in arrays)
        result.append(seconds / size if size else math.inf)
    return result


def without(instance: Instance, cheap: Sequence[Unit], plain: States) -> States:
    """Return the states in which some units are made again once, where that is wanted, and others are kept.

    Args:
        instance: the step.
        cheap: the units; those that nothing of a later phase reads are made again for others alone.
        plain: the states without any repetition.
    """
    may_repeat = set(cheap)
    pending = [unit for unit in cheap if plain[unit] == KEPT]
    repeated = set(pending)
    while pending:
        wanted = may_repeat.intersection(instance.units.reads[pending.pop()]) - repeated
        repeated |= wanted
        pending += sorted(wanted)
    return states_of(instance, repeated, plain)
