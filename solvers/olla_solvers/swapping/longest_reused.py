"""Swaps those activations that are needed again last, as TFLMS does.

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018): of each array that a step
makes, the two accesses with most operators between them count; arrays are taken by that distance, the longest
first. Copying in begins so many operators ahead, whatever the link takes; one, by default. The user of TFLMS
says how many arrays to swap; here that follows from the limit. Weights stay, and where memory is short, an
operator waits until copies out are done, as TensorFlow's allocator does.
"""

from __future__ import annotations

from olla_solvers.errors import OptionError
from olla_solvers.problem import ArrayKind, Bytes
from olla_solvers.swapping.autoswap.schedule import schedule
from olla_solvers.swapping.autoswap.selection import select
from olla_solvers.swapping.plan import LEAST_BYTES, SwapPlan, check_limit, plan_of
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link


def longest_reused(
    step: TimedStep, limit_bytes: Bytes, link: Link, *, ahead: int = 1, least_bytes: Bytes = LEAST_BYTES
) -> SwapPlan:
    """Plan a step by swapping the arrays that are reused after most operators.

    Args:
        step: any.
        limit_bytes: of the load.
        link: which copies.
        ahead: so many operators before its access an array is copied in.
        least_bytes: smaller arrays stay.

    Returns:
        A plan within the limit; if no number of such arrays does, one that swaps all.

    Raises:
        OptionError: if ``ahead`` is below 0.
    """
    check_limit(limit_bytes)
    if ahead < 0:
        raise OptionError(f"copies in begin 0 or more operators ahead, not {ahead}")
    longest = [
        max(gaps, key=lambda gap: gap.back_before - gap.out_after)
        for array, gaps in zip(step.problem.arrays, step.gaps, strict=True)
        if gaps and array.kind is ArrayKind.PLANNED and array.size_bytes >= least_bytes
    ]
    gaps = select(step, longest, [gap.back_before - gap.out_after for gap in longest], limit_bytes)
    starts = [max(gap.back_before - ahead, gap.out_after + 1) for gap in gaps]
    return plan_of(step, schedule(step, gaps, limit_bytes, link, starts), link)
