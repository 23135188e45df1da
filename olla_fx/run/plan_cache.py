"""The plans that a module keeps: those of other kinds of calls, and those for other states of the model.

A loop that freezes a network in every step, or turns autocast on and off, comes back to a state that was
planned for before. So a plan that no longer fits is kept beside the one that takes its place, until there are
too many and the one that was not used for longest goes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla_fx.capture import CapturedStep
from olla_fx.guards import Mismatch, Prologue
from olla_fx.plan import Plan
from olla_fx.run.cuda_graph import GraphedStep
from olla_fx.run.executor import Executor
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
        key: what tells calls apart by their inputs.
        kind: the mode of the call, and the modules' training flags.
        step: the planned step.
        prologue: gathers its inputs, and tells if it still fits the model.
        example: the inputs that it was planned for, their tensors as specs.
        graphed: launches it as CUDA graphs, if it is to be.
        layouts: what is known of the layouts of its outputs' gradients.
    """

    key: Hashable
    kind: Hashable
    step: CompiledStep
    prologue: Prologue
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

    def fitting(
        self, key: Hashable, examples: Sequence[torch.Tensor]
    ) -> tuple[KeptPlan, list[Any]] | dict[Hashable, str]:
        """Find the plan for a call that fits the model as it is.

        Args:
            key: what tells the call apart by its inputs.
            examples: the tensors among these.

        Returns:
            The plan and the values of its placeholders; if there is none, for each kind of call the reason
            why the plan that was used last does not fit.

        Raises:
            StepInputError: if an input cannot be used with the plan that fits.
        """
        plans = [planned for planned in reversed(self._plans) if planned.key == key]
        for planned in plans:
            values = planned.prologue.check(examples)
            if values is not None:
                return self._used(planned), values
        if plans:
            plans[0].prologue.adopt_parameters()
        reasons: dict[Hashable, str] = {}
        for planned in plans:
            gathered = planned.prologue.run(examples)
            if not isinstance(gathered, Mismatch):
                return self._used(planned), gathered
            reasons.setdefault(planned.kind, gathered.reason)
        return reasons

    def _used(self, planned: KeptPlan) -> KeptPlan:
        self._plans.remove(planned)
        self._plans.append(planned)
        return planned

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
        present = [planned for planned in self._plans if planned.prologue.lost() is None]
        lost = len(present) < len(self._plans)
        self._plans = present
        return lost
