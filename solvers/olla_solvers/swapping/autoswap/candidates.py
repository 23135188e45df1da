"""Finds what AutoSwap may swap: large arrays that wait for an access when the load peaks (section IV-A)."""

from __future__ import annotations

from olla_solvers.problem import Bytes, Timestep
from olla_solvers.swapping.gaps import Gap
from olla_solvers.swapping.plan import LEAST_BYTES
from olla_solvers.swapping.timed_step import TimedStep


def candidates(step: TimedStep, least_bytes: Bytes = LEAST_BYTES) -> tuple[Gap, ...]:
    """Return the gaps that lie across the peak; each array has one at most.

    Args:
        step: any.
        least_bytes: smaller arrays are none.
    """
    peak = peak_timestep(step)
    return tuple(
        gap
        for gaps in step.gaps
        for gap in gaps
        if gap.size_bytes >= least_bytes and gap.moment_of(peak, step.length) is not None
    )


def peak_timestep(step: TimedStep) -> Timestep:
    """Return the first timestep of the largest load; 0 for an empty step."""
    return int(step.load_bytes.argmax()) if step.length else 0


def least_load_bytes(step: TimedStep, least_bytes: Bytes = LEAST_BYTES) -> Bytes:
    """Return the paper's load_min: the peak if all candidates are away as long as they can be (section VI-B).

    Args:
        step: any.
        least_bytes: smaller arrays are no candidates.
    """
    return int(step.load_without(candidates(step, least_bytes)).max(initial=0))
