"""Chooses what backward computes again instead of keeping it since forward.

The step in its best order without repetitions, the seconds of its operators and what may run again make the
problem that :mod:`olla_solvers.recomputation` solves. Its answer is put into the graph, which is ordered
anew, and taken only if the peak falls by it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from olla_fx.costs import Costs, DeviceProfile, operator_seconds
from olla_fx.errors import CaptureError
from olla_fx.fx_graph import source_of
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.recomputation.problem import RepeatedStep, recomputation_problem, with_repetitions
from olla_fx.recomputed import Recomputed, RecomputedArray
from olla_fx.rewriting import Candidate, Rewriting
from olla_solvers.analysis import peak_bytes
from olla_solvers.order import order_quickly
from olla_solvers.plan import Schedule
from olla_solvers.problem import Array, OperatorIndex
from olla_solvers.recomputation.least_memory import least_memory
from olla_solvers.recomputation.orders import early_order, grouped_order
from olla_solvers.recomputation.problem import Recomputation, RecomputationProblem

logger = logging.getLogger(__name__)

LEAST_GAIN = 0.01
"""Share of the peak that recomputation must save."""


@dataclass(frozen=True)
class RecomputableStep:
    """A step of which some may run again.

    Attributes:
        rewriting: with which it was made.
        kept: its graph in which nothing is written over what an earlier phase made, ordered.
        problem: what may run again in it.
        costs: of its operators.
        probe: says whether kernels give equal bits; None if none may be used that need this.
    """

    rewriting: Rewriting
    kept: Candidate
    problem: RecomputationProblem
    costs: Costs
    probe: Probe | None

    @classmethod
    def of(
        cls, rewriting: Rewriting, candidate: Candidate, profile: DeviceProfile | None = None
    ) -> RecomputableStep:
        """State what of a step may run again.

        Args:
            rewriting: the step.
            candidate: its graph after the rewrites that pay.
            profile: of a device that is not there, whose time counts; None for the one that the step is for.
        """
        kept = rewriting.ordered(rewriting.keeping_phases(candidate))
        if kept.schedule is None:
            raise ValueError("the candidate was not ordered")
        costs = operator_seconds(kept.dataflow, profile)
        probe = rewriting.probe if profile is None else None
        problem = _problem(kept, kept.schedule.order, costs, probe)
        return cls(rewriting, kept, problem, costs, probe)

    def orders(self) -> tuple[RecomputationProblem, ...]:
        """Return the problem in its order, in one that is good if all that may be is made again, and others.

        An order of the smallest peak defers what makes little room, such as the gradients of weights. Where
        arrays are dropped, something else decides (:mod:`olla_solvers.recomputation.orders`).
        """
        problem = self.kept.dataflow.problem
        sizes = [
            0 if makers else array.size_bytes
            for array, makers in zip(problem.arrays, self.problem.makers, strict=True)
        ]
        workspaces = [operator.workspace_bytes for operator in problem.operators]
        free = order_quickly(problem.resized(sizes, workspaces), self.rewriting.seconds).order
        orders = (free, early_order(self.problem), grouped_order(self.problem))
        others = dict.fromkeys(order for order in orders if order is not None)
        return (
            self.problem,
            *(
                stated
                for stated in (_problem(self.kept, order, self.costs, self.probe) for order in others)
                if stated.order != self.problem.order
            ),
        )

    def repeated(self, answer: Recomputation) -> Candidate:
        """Put an answer into the graph, and order that.

        Args:
            answer: for one of :meth:`orders`.

        Returns:
            The candidate, which tells what it computes again.

        Raises:
            CaptureError: if the graph does not allow it.
        """
        step = with_repetitions(self.kept.dataflow, answer.executions, self.probe)
        dataflow = self.rewriting.with_workspaces(step.dataflow)
        candidate = Candidate(dataflow, self.kept.changes, recomputed=self._told(answer))
        return self.rewriting.ordered(candidate, step.order)

    def in_sequence(self, answer: Recomputation) -> tuple[Candidate, RepeatedStep]:
        """Put an answer into the graph, in its own sequence, which transfers were chosen for.

        Args:
            answer: for one of :meth:`orders`.

        Returns:
            The candidate, and what became of the answer's executions.

        Raises:
            CaptureError: if the graph does not allow it.
        """
        step = with_repetitions(self.kept.dataflow, answer.executions, self.probe)
        dataflow = self.rewriting.with_workspaces(step.dataflow)
        order = tuple(dataflow.problem.indices_of(step.order))
        schedule = Schedule(order, peak_bytes(dataflow.problem, order), 0, "recomputation")
        candidate = Candidate(dataflow, self.kept.changes, schedule, recomputed=self._told(answer))
        return candidate, step

    def _told(self, answer: Recomputation) -> Recomputed:
        """Return what is told of an answer."""
        problem = self.problem
        made_together: dict[tuple[OperatorIndex, ...], list[Array]] = {}
        for index in answer.dropped:
            # Another order may allow what this one does not.
            array = problem.problem.arrays[index]
            makers = problem.makers[index] or (cast(OperatorIndex, array.producer),)
            made_together.setdefault(makers, []).append(array)
        arrays = []
        for makers, together in made_together.items():
            largest = max(together, key=lambda array: array.size_bytes)
            size_bytes = sum(array.size_bytes for array in together)
            seconds = sum(problem.repetition_seconds[operator] for operator in makers)
            source = source_of(self.kept.dataflow.operators[makers[0]])
            arrays.append(RecomputedArray(largest.name, size_bytes, seconds, source))
        return Recomputed(
            tuple(arrays),
            sum(execution.copy > 0 for execution in answer.executions),
            answer.extra_seconds,
            problem.step_seconds,
            self.costs.told,
        )


def _problem(
    kept: Candidate, order: Sequence[OperatorIndex], costs: Costs, probe: Probe | None
) -> RecomputationProblem:
    return recomputation_problem(
        kept.dataflow, order, costs.seconds, probe, costs.moving_seconds, costs.again_seconds
    )


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
    step = RecomputableStep.of(rewriting, candidate, profile)
    deadline = time.monotonic() + rewriting.seconds
    answer = least_memory(step.problem, share * step.problem.step_seconds, deadline=deadline)
    if not answer.dropped:
        return candidate
    try:
        repeated = step.repeated(answer)
    except CaptureError as error:
        logger.warning("nothing of the step is recomputed: %s", error)
        return candidate
    candidate = rewriting.ordered(candidate)
    if repeated.peak_bytes > (1 - LEAST_GAIN) * candidate.peak_bytes:
        return candidate
    saved_bytes = candidate.peak_bytes - repeated.peak_bytes
    return replace(repeated, recomputed=replace(repeated.recomputed, saved_bytes=saved_bytes))
