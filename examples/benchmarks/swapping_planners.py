"""Plans steps by the published planners that swap, and counts their plans as all others are counted.

Those planners know no memory that is taken over, and count the caller's arrays. Here these have no bytes, and
limits are tried from laxer ones on, until a plan is within the real one by the count of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from olla_solvers.problem import ArrayKind
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import RecomputationProblem
from olla_solvers.swapping.methods import METHODS
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link, Transfer, away_bytes

AUTOSWAP_SCORES = ("autoswap-doa", "autoswap-aoa", "autoswap-wdoa", "autoswap-swdoa")

LAXER = (1.4, 1.3, 1.2, 1.15, 1.1, 1.05, 1.0)
"""Limits that are tried, relative to the real one."""


@dataclass(frozen=True)
class SwappableStep:
    """A step in its order, as the published planners see it.

    Attributes:
        step: with the caller's arrays at no bytes.
        resident_bytes: of each timestep, planned arrays and workspaces.
        sizes: of the arrays.
    """

    step: TimedStep
    resident_bytes: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, problem: RecomputationProblem) -> SwappableStep:
        """Return a step as the published planners see it.

        Args:
            problem: the step.
        """
        arrays, operators = problem.problem.arrays, problem.problem.operators
        planned = [0 if array.kind is ArrayKind.STATIC else array.size_bytes for array in arrays]
        workspaces = [operator.workspace_bytes for operator in operators]
        step = TimedStep(problem.problem.resized(planned, workspaces), problem.order, problem.seconds)
        evaluator = Evaluator(prepare(problem))
        evaluator.evaluate(plain_states(evaluator.instance))
        resident = tuple(int(size) for size in evaluator.trace.timestep_bytes[: step.length])
        return cls(step, resident, tuple(array.size_bytes for array in arrays))

    @property
    def peak_bytes(self) -> int:
        """Of planned arrays and workspaces if nothing is swapped."""
        return max(self.resident_bytes)

    def plan(self, methods: Sequence[str], limit_bytes: int, link: Link) -> tuple[int, float] | None:
        """Return peak and extra seconds of the fastest plan within a limit by some methods; None without one.

        Args:
            methods: names of :data:`METHODS`.
            limit_bytes: of planned arrays and workspaces.
            link: which copies.
        """
        plans: list[tuple[float, int]] = []
        for method in methods:
            for laxer in LAXER:
                plan = METHODS[method](self.step, int(laxer * limit_bytes), link)
                peak_bytes = self._peak_with(plan.transfers)
                if peak_bytes <= limit_bytes:
                    plans.append((plan.extra_seconds, peak_bytes))
                    break
        if not plans:
            return None
        extra_seconds, peak_bytes = min(plans)
        return peak_bytes, extra_seconds

    def _peak_with(self, transfers: Sequence[Transfer]) -> int:
        sizes = [self.sizes[transfer.array] for transfer in transfers]
        away = away_bytes(transfers, sizes, self.step.length)
        return max(there - gone for there, gone in zip(self.resident_bytes, away, strict=True))
