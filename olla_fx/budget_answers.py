"""Asks for the fastest sequence within a budget, and puts it into the graph.

Without a link to the host the sequence computes again
(:mod:`olla_solvers.recomputation.least_time`); with one, arrays of it may wait on the host, too
(:mod:`olla_solvers.swapping.least_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from olla_fx.costs import DeviceProfile
from olla_fx.recomputation import RecomputableStep
from olla_fx.recomputation.transfers import transfers_of_repeated
from olla_fx.rewriting import Candidate
from olla_fx.sharing import choose_sharing
from olla_fx.swap_request import SwapProblem, SwapRequest
from olla_fx.swapping import swap
from olla_solvers.problem import Bytes
from olla_solvers.recomputation.bounds import LowerBound
from olla_solvers.recomputation.least_time import WithinBudget, curve, least_time
from olla_solvers.recomputation.problem import Recomputation, Seconds
from olla_solvers.swapping.least_time import least_time_with_swaps
from olla_solvers.swapping.transfers import Link, Transfer

EFFORT = 4.0
"""How many times as long a search takes if the first one has found nothing within the budget."""

SMALLER_PEAKS = 4
"""Peaks below the lowest that was found at once, for which it searches."""


@dataclass(frozen=True)
class Answer:
    """A sequence, and what is proven of all.

    Attributes:
        budget_bytes: that was asked for, of planned arrays and workspaces.
        peak_bytes: of the sequence.
        extra_seconds: of its repetitions and stalls.
        recomputation: what runs again.
        bound: what is proven of the budget.
        transfers: what waits on the host, in the timesteps of the sequence.
    """

    budget_bytes: Bytes
    peak_bytes: Bytes
    extra_seconds: Seconds
    recomputation: Recomputation
    bound: LowerBound
    transfers: tuple[Transfer, ...] = ()

    @property
    def is_met(self) -> bool:
        """True if the sequence is within the budget."""
        return self.peak_bytes <= self.budget_bytes

    def asked_for(self, other: Answer) -> Answer:
        """Return the same sequence as an answer to what another one was asked for."""
        return replace(self, budget_bytes=other.budget_bytes, bound=other.bound)


class Sequences:
    """Finds sequences of one step.

    Attributes:
        step: what may run again.
    """

    def __init__(
        self, step: RecomputableStep, solver: str, link: Link | None, profile: DeviceProfile | None
    ) -> None:
        """Take the step in its orders.

        Args:
            step: what may run again.
            solver: for integer programs.
            link: to the host; None if nothing may wait there.
            profile: of a device that is not there, whose time counts.
        """
        self.step = step
        self._problems = step.orders()
        self._solver = solver
        self._link = link
        self._profile = profile

    def fastest(self, budget_bytes: Bytes, deadline: float, effort: float = 1.0) -> Answer:
        """Return the fastest sequence that is found within a budget, or the one with the lowest peak.

        Args:
            budget_bytes: of planned arrays and workspaces.
            deadline: ``time.monotonic()`` at which to stop with what there is.
            effort: as :func:`least_time` takes it.
        """
        solver = self._solver
        if self._link is None:
            return _alone(
                least_time(self._problems, budget_bytes, deadline=deadline, effort=effort, solver=solver)
            )
        both = least_time_with_swaps(
            self._problems, budget_bytes, self._link, deadline=deadline, effort=effort, solver=solver
        )
        return Answer(
            budget_bytes,
            both.peak_bytes,
            both.extra_seconds,
            both.recomputation,
            both.bound,
            both.transfers,
        )

    def lowest(self, deadline: float) -> list[Answer]:
        """Return sequences of the smallest peaks that are found, whatever the budget is.

        So every budget that is not met is told the same smallest plan, and one that has room for it takes it.

        Args:
            deadline: ``time.monotonic()`` at which to stop with what there is.
        """
        lowest = self.fastest(0, deadline, EFFORT)
        span_bytes = max(0, lowest.peak_bytes - lowest.bound.least_bytes)
        peaks = [lowest.peak_bytes - span_bytes * step // SMALLER_PEAKS for step in range(SMALLER_PEAKS + 1)]
        if self._link is not None:
            return [lowest, *(self.fastest(peak_bytes, deadline, EFFORT) for peak_bytes in peaks)]
        answers = curve(self._problems, peaks, deadline=deadline, effort=EFFORT, solver=self._solver)
        return [lowest, *map(_alone, answers)]

    def candidate(self, answer: Answer) -> Candidate:
        """Put an answer into the graph, and order that; with transfers it keeps the answer's sequence.

        Args:
            answer: of this step.

        Raises:
            CaptureError: if the graph does not allow a repetition.
            SwapError: if it does not allow a transfer.
        """
        rewriting = self.step.rewriting
        if not answer.transfers or self._link is None:
            return choose_sharing(rewriting, self.step.repeated(answer.recomputation))
        candidate, repeated = self.step.in_sequence(answer.recomputation)
        executions = answer.recomputation.executions
        transfers = transfers_of_repeated(self.step.kept.dataflow, executions, repeated, answer.transfers)

        def those_that_may(stated: SwapProblem) -> Sequence[Transfer]:
            return [transfer for transfer in transfers if transfer.array in stated.may_wait]

        return swap(rewriting, candidate, SwapRequest(those_that_may, self._link), self._profile)


def _alone(answer: WithinBudget) -> Answer:
    recomputation = answer.recomputation
    return Answer(
        answer.budget_bytes,
        recomputation.peak_bytes,
        recomputation.extra_seconds,
        recomputation,
        answer.bound,
    )
