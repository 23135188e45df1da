"""What the pipeline is asked for, and what comes out of it.

A step is captured and planned from a :class:`CompileRequest`, and planned again from one that has the earlier
:class:`CompiledStep` in it. What runs a plan, predicts it or tells of it needs these alone, not the pipeline
(:mod:`olla_fx.compile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from olla_fx.arena import Binding
from olla_fx.capture import CapturedStep, Mode, StepRequest
from olla_fx.costs import DeviceProfile
from olla_fx.dataflow import Dataflow
from olla_fx.emit import EmittedStep
from olla_fx.fx_graph import forward_backward_boundary
from olla_fx.memory_budget import MemoryBudget
from olla_fx.progress import Progress
from olla_fx.step_plan import Plan
from olla_fx.time_limit import TimeLimit
from olla_fx.within_budget import BudgetedStep
from olla_solvers.pauses import held_at
from olla_solvers.problem import Offset, Problem


@dataclass(frozen=True)
class CompileRequest:
    """A step that is to be compiled.

    Attributes:
        step: the user's model, inputs and options.
        in_buffer: False if the step is to run with the stock allocator.
        runs: False if only the plan's figures are wanted: nothing is emitted or kept on disk.
        limit: of the call that planning is a part of; None if this is all that the call plans.
        progress: of what planning is a part of, if that is told as one; None to tell this planning's.
        earlier: the result of the first stages (capture, passes, dataflow), to plan a step again.
        problem: the captured problem with recorded workspaces, to plan instead of it.
        start: operators' names in the order of a similar step's plan, such as one of another batch size, to
            begin from; by default that of ``earlier``.
        profile: of a device that is not there, whose seconds count; None for the one that the step is for.
        earlier_budget_bytes: of the plans for other kinds of calls; None if there are none.
        may_exceed: True to warn if the step does not fit into its memory budget, and False to raise.
    """

    step: StepRequest
    in_buffer: bool = True
    runs: bool = True
    limit: TimeLimit | None = None
    progress: Progress | None = None
    earlier: CompiledStep | None = None
    problem: Problem | None = None
    start: Sequence[str] | None = None
    profile: DeviceProfile | None = None
    earlier_budget_bytes: int | None = None
    may_exceed: bool = False

    def budget_of(self, mode: Mode) -> MemoryBudget | None:
        """Return the memory budget of a step; None without one.

        A share is not less than what other kinds of calls have: their buffer is there anyway. In inference
        nothing is kept that could be computed again, so that a share of it would never do.

        Args:
            mode: of the step.
        """
        budget = self.step.options.budget
        if budget is None or (budget.share is not None and mode is Mode.INFERENCE):
            return None
        return replace(budget, least_bytes=self.earlier_budget_bytes or 0)


@dataclass(frozen=True)
class CompiledStep:
    """A step that was captured and planned.

    Attributes:
        captured: what flows into the step, with its graph after all passes.
        dataflow: its operators and arrays after all passes.
        plan: the validated plan.
        binding: where its arrays are to live.
        emitted: what runs; empty if the request said that nothing will.
        budgeted: with a memory budget, what the step was chosen from.
    """

    captured: CapturedStep
    dataflow: Dataflow
    plan: Plan
    binding: Binding
    emitted: EmittedStep
    budgeted: BudgetedStep | None = None

    def operator_of(self, marker: object) -> str | None:
        """Return the operator that stands for a marker in the graph; None if there is none."""
        operators = zip(self.dataflow.operators, self.plan.problem.operators, strict=True)
        return next((operator.name for node, operator in operators if node.target is marker), None)

    @cached_property
    def held_while_waiting(self) -> tuple[Offset, Offset]:
        """The addresses between which everything lies that is alive at the forward/backward boundary."""
        boundary = self.operator_of(forward_backward_boundary)
        return (0, 0) if boundary is None else held_at(self.plan.problem, self.plan.memory, boundary)


def plan_of(step: CompiledStep, update: CompiledStep | None) -> Plan:
    """Return the plan of a step with that of the update after its micro-batches, if it has these."""
    if update is None:
        return step.plan
    seconds = dict(step.plan.timings)
    for stage, more in update.plan.timings.items():
        seconds[stage] = seconds.get(stage, 0.0) + more
    micro_batches = step.captured.micro_batches
    return replace(step.plan, timings=seconds, micro_batches=micro_batches, update=update.plan)
