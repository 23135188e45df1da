"""Chooses what backward computes again instead of keeping it since forward.

The step in its best order without repetitions, the seconds of its operators and what may run again make the
problem that :mod:`olla_solvers.recomputation` solves. Its answer is put into the graph, which is ordered
anew, and taken only if the peak falls by it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from olla_fx.costs import Costs, DeviceProfile, operator_seconds
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import source_of
from olla_fx.recomputation.problem import recomputation_problem, with_repetitions
from olla_fx.recomputed import Recomputed, RecomputedArray
from olla_fx.rewriting import Candidate, Rewriting
from olla_solvers.problem import Array, OperatorIndex
from olla_solvers.recomputation.least_memory import least_memory
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.01
"""Share of the peak that recomputation must save."""


def choose_recomputation(
    rewriting: Rewriting, candidate: Candidate, share: float, profile: DeviceProfile | None = None
) -> Candidate:
    """Return a step that needs less within a share of its time.

    Args:
        rewriting: the step.
        candidate: its graph after the rewrites that pay.
        share: of the step's time, that repetitions may take.
        profile: of a device that is not there, whose time counts; None for the one that the step is for.

    Returns:
        The candidate itself if nothing pays.
    """
    if share <= 0:
        return candidate
    kept = rewriting.ordered(rewriting.keeping_forward(candidate))
    if kept.schedule is None:
        raise ValueError("the candidate was not ordered")
    costs = operator_seconds(kept.dataflow, profile)
    probe = rewriting.probe if profile is None else None
    problem = recomputation_problem(
        kept.dataflow, kept.schedule.order, costs.seconds, probe, costs.moving_seconds
    )
    deadline = time.monotonic() + rewriting.seconds
    answer = least_memory(problem, share * problem.step_seconds, deadline=deadline)
    if not answer.dropped:
        return candidate
    try:
        step = with_repetitions(kept.dataflow, answer.executions, probe)
    except CaptureError as error:
        logger.warning("nothing of the step is recomputed: %s", error)
        return candidate
    repeated = rewriting.ordered(Candidate(step.dataflow, candidate.changes), step.order)
    candidate = rewriting.ordered(candidate)
    if repeated.peak_bytes > (1 - LEAST_GAIN) * candidate.peak_bytes:
        return candidate
    saved_bytes = candidate.peak_bytes - repeated.peak_bytes
    return replace(repeated, recomputed=_told(kept, problem, answer, costs, saved_bytes))


def _told(
    kept: Candidate, problem: RecomputationProblem, answer: Recomputation, costs: Costs, saved_bytes: int
) -> Recomputed:
    """Return what is told of an answer."""
    made_together: dict[tuple[OperatorIndex, ...], list[Array]] = {}
    for index in answer.dropped:
        made_together.setdefault(problem.makers[index], []).append(problem.problem.arrays[index])
    arrays = []
    for makers, together in made_together.items():
        largest = max(together, key=lambda array: array.size_bytes)
        size_bytes = sum(array.size_bytes for array in together)
        seconds = sum(problem.repetition_seconds[operator] for operator in makers)
        source = source_of(kept.dataflow.operators[makers[0]])
        arrays.append(RecomputedArray(largest.name, size_bytes, seconds, source))
    return Recomputed(
        tuple(arrays),
        _repetitions(answer),
        answer.extra_seconds,
        problem.step_seconds,
        costs.told,
        saved_bytes,
    )


def _repetitions(answer: Recomputation) -> int:
    return sum(execution.copy > 0 for execution in answer.executions)
