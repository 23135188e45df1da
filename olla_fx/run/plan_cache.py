"""The plans that a module keeps: those of other kinds of calls, and those for other states of the model.

A loop that freezes a network in every step, or turns autocast on and off, comes back to a state that was
planned for before. So a plan that no longer fits is kept beside the one that takes its place, until there are
too many and the one that was not used for longest goes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from olla_fx.capture import CapturedStep
from olla_fx.plan import Plan
from olla_fx.run.cuda_graph import GraphedStep
from olla_fx.run.executor import Executor
from olla_fx.run.lookup import StepLookup
from olla_fx.run.repetition import TangentLayouts
from olla_solvers.errors import OptionError


@dataclass(frozen=True)
class CompiledStep:
    """One planned step.

    Attributes:
        captured: what was captured.
        executor: runs it.
        describe: the executor's present plan as its user sees it.
    """

    captured: CapturedStep
    executor: Executor
    describe: Callable[[Executor], Plan]


@dataclass(frozen=True, eq=False)
class KeptPlan:
    """A plan, the kind of call that it is for, and what its calls need.

    Attributes:
        key: the kind of call.
        step: the planned step.
        lookup: finds its inputs, and tells whether it still fits the model.
        example: the inputs that it was planned for, their tensors as specs.
        graphed: launches it as CUDA graphs, if it is to be.
        layouts: what is known of the layouts of its outputs' gradients.
    """

    key: Hashable
    step: CompiledStep
    lookup: StepLookup
    example: Any
    graphed: GraphedStep | None
    layouts: TangentLayouts


class KeptPlans:
    """Plans in the order of their last use."""

    def __init__(self, limit: int) -> None:
        """Begin without any.

        Args:
            limit: how many to keep.

        Raises:
            OptionError: when it is no whole number of at least 1.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise OptionError(f"most_plans is a whole number of at least 1, not {limit!r}")
        self.limit = limit
        self._plans: list[KeptPlan] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._plans)

    def fitting(self, key: Hashable) -> tuple[KeptPlan | None, str | None]:
        """The plan for a kind of call that fits the model as it is.

        Returns:
            It, or None; and why the one that was used last for this kind does not fit, if there is one.
        """
        reason = None
        for planned in [each for each in reversed(self._plans) if each.key == key]:
            if reason is None:
                planned.lookup.adopt_parameters()
            outdated = planned.lookup.outdated()
            if outdated is None:
                self._plans.remove(planned)
                self._plans.append(planned)
                return planned, reason
            reason = reason or outdated
        return None, reason

    def keep(self, planned: KeptPlan, instead_of: KeptPlan | None = None) -> None:
        """Add a plan; the one that was not used for longest goes where there are too many.

        Args:
            planned: the plan.
            instead_of: one that is never to be used again.
        """
        self._plans = [each for each in self._plans if each is not instead_of]
        self._plans.append(planned)
        del self._plans[: -self.limit]

    def drop_lost(self) -> bool:
        """Forget plans for tensors or modules that the model no longer has, as after ``.to(dtype)``.

        A plan holds on to its modules, and they to their parameters.

        Returns:
            Whether there were any.
        """
        present = [
            each
            for each in self._plans
            if not each.lookup.structure_outdated() and not each.lookup.tensors_lost()
        ]
        lost = len(present) < len(self._plans)
        self._plans = present
        return lost
