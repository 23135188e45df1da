"""Chooses what waits on the host, for tests: all that can."""

import itertools
import math

from olla_fx.swap_request import SwapProblem, SwapRequest
from olla_solvers.analysis import timesteps
from olla_solvers.swapping.transfers import Link, Transfer

FAST = Link(math.inf, math.inf)
"""As fast as the machine copies."""

SLOW = Link(2e8, 2e8, 1e-4)
"""So slow that copies of small models are late."""


def all_that_can(stated: SwapProblem, distance: int = 2, least_gap: int = 2) -> list[Transfer]:
    """Let every array wait on the host between each two uses.

    Args:
        stated: the step.
        distance: timesteps between the beginning of a copy and its wait, if there are so many.
        least_gap: between two uses.
    """
    at = timesteps(stated.order)
    transfers = []
    for index in sorted(stated.may_wait):
        array = stated.problem.arrays[index]
        uses = sorted({at[array.producer], *(at[consumer] for consumer in array.consumers)})
        for out_after, back_before in itertools.pairwise(uses):
            if back_before - out_after >= least_gap:
                gone_before = min(out_after + 1 + distance, back_before - 1)
                back_from = max(back_before - distance, gone_before + 1)
                transfers.append(Transfer(out_after, gone_before, back_from, back_before, index))
    return transfers


def at_once(stated: SwapProblem) -> list[Transfer]:
    """Let every array wait on the host, and wait for each copy where it begins."""
    return all_that_can(stated, distance=0)


def far_ones(stated: SwapProblem) -> list[Transfer]:
    """Let the arrays wait that are not used for long, a quarter of the step."""
    return all_that_can(stated, distance=3, least_gap=len(stated.order) // 4)


def swapping(link: Link = FAST, choose=all_that_can) -> SwapRequest:
    """Return a request for a step with everything on the host that can be there."""
    return SwapRequest(choose, link)
