"""The plans that a module keeps: for other kinds of calls, and for other states of the model.

A loop that freezes a network in every step, or turns autocast on and off, comes back to a state that was
planned for before. So a plan that no longer fits stays in the cache beside the one that takes its place,
until there are too many and the one that was not used for longest goes.

In the caller's own loop nobody knows before a backward in which memory layout the loss hands gradients in,
and the order of a sum's terms, with it the last bit, depends on that. A forward is planned for the layouts
that the last backward of its kind received. Likewise nobody knows before a backward which gradients autograd
leaves to it, and whether they come to an old ``.grad``: a loop may clear them before the forward or after it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from olla_fx.arena import RunCounts
from olla_fx.compiled import CompiledStep, plan_of
from olla_fx.dataflow import GradientsInBuffer
from olla_fx.guards import Mismatch, Prologue
from olla_fx.run.answers import Answers
from olla_fx.run.cuda_graph import GraphedStep
from olla_fx.run.executor import Executor
from olla_fx.step_plan import Plan
from olla_fx.time_limit import TimeLimit

MOST_EXECUTORS = 4
"""Plans of one captured step that differ in the gradients that are made in the buffer."""

Strides = tuple[tuple[int, ...], ...]
"""Element strides of the gradients that come back to a step's outputs, in order."""


@dataclass(eq=False)
class CachedPlan:
    """A plan, the kind of call that it is for, and what its calls need.

    Attributes:
        key: what tells calls apart by their inputs.
        kind: the mode of the call, and the modules' training flags.
        executor: ran it last.
        graphed: launches it as CUDA graphs, if it is to be.
        prologue: gathers its inputs, and tells if it still fits the model.
        example: the inputs that it was planned for, their tensors as specs.
        update: of a step in micro-batches, what runs after the last of them.
        executors: run it for the gradients that are made in the buffer.
        suited: the gradients that suited the buffer at the last backward after a forward that saw ``.grad``,
            and after one that saw none.
        saw_gradients: True if the last forward saw a ``.grad``; None before the first.
        clears_gradients: False if gradients were still there at the forward after they were made.
        may_leave_gradients: False once gradients that were left in the buffer could not be moved.
        uses: the number of calls that it was found for.
    """

    key: Hashable
    kind: Hashable
    executor: Executor
    graphed: GraphedStep | None
    prologue: Prologue
    example: Any
    update: CachedPlan | None = None
    executors: dict[GradientsInBuffer, Executor] = field(default_factory=dict)
    suited: dict[bool, GradientsInBuffer] = field(default_factory=dict)
    saw_gradients: bool | None = None
    clears_gradients: bool = True
    may_leave_gradients: bool = True
    uses: int = 0

    def choose_executor(self, sees_gradients: bool, limit: TimeLimit) -> None:
        """Choose by what earlier backwards of such a forward did, or plan for it.

        A new ``.grad`` is in the buffer if the loop clears it before the next forward, which needs the
        room. What is added to an old one is gone at once. The operators are the same for all of
        these plans and their workspaces known, so that planning is quick.

        Args:
            sees_gradients: True if a parameter has a ``.grad`` before the forward.
            limit: of the call.
        """
        if self.saw_gradients is False:
            self.clears_gradients = not sees_gradients
        self.saw_gradients = sees_gradients
        if not self.executor.is_settled:
            return
        self.executors.setdefault(self.executor.step.dataflow.gradients, self.executor)
        wanted = self.suited.get(sees_gradients, self.executor.step.dataflow.gradients)
        self.may_leave_gradients &= not self.executor.leaves_stuck_gradients
        if not (self.clears_gradients and self.may_leave_gradients):
            wanted = replace(wanted, kept=frozenset())
        if wanted not in self.executors:
            if len(self.executors) >= MOST_EXECUTORS:
                self.executors = {}
            self.executors[wanted] = self.executor.planned_for(wanted, limit)
        self.executor = self.executors[wanted]

    @functools.cached_property
    def answers(self) -> Answers:
        """What was answered about the inputs that it was planned for."""
        captured = self.executor.step.captured
        return Answers(captured.questions, captured.micro_batches)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return plan_of(self.executor.step, None if self.update is None else self.update.executor.step)

    @property
    def steps(self) -> tuple[CompiledStep, ...]:
        """The compiled steps in force, in the order in which they run."""
        return tuple(part.executor.step for part in self._parts)

    @property
    def graph_modules(self) -> tuple[fx.GraphModule, ...]:
        """The graphs that run, in order."""
        return tuple(graph for step in self.steps for graph in step.emitted.phases)

    @property
    def counts(self) -> RunCounts:
        """The requests of the last run, or of the last micro-batch and the update."""
        return functools.reduce(
            RunCounts.and_those_of, (part.executor.counts for part in self._parts), RunCounts()
        )

    @property
    def outside_log(self) -> tuple[str, ...]:
        """The unexpected ones among :attr:`counts`."""
        return tuple(line for part in self._parts for line in part.executor.outside_log)

    @property
    def _parts(self) -> tuple[CachedPlan, ...]:
        return (self,) if self.update is None else (self, self.update)


class PlanCache:
    """Plans in the order of their last use.

    Attributes:
        limit: how many to keep.
    """

    def __init__(self, limit: int) -> None:
        """Begin without any."""
        self.limit = limit
        self._plans: list[CachedPlan] = []
        self._gradient_strides: dict[tuple[Hashable, Hashable], Strides] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._plans)

    def newest_first(self) -> Iterator[CachedPlan]:
        """Return the plans, the one that was used last first."""
        return iter(list(reversed(self._plans)))

    def fitting(
        self, key: Hashable, examples: Sequence[torch.Tensor]
    ) -> tuple[CachedPlan, list[Any]] | dict[Hashable, str]:
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
        plans = self.alike(key)
        reasons: dict[Hashable, str] = {}
        answering: list[CachedPlan] = []
        for plan in plans:
            other = plan.answers.other(examples)
            if other is not None:
                reasons.setdefault(plan.kind, other.sentence)
                continue
            values = plan.prologue.check(examples)
            if values is not None:
                return self._used(plan), values
            answering.append(plan)
        for plan in answering:
            gathered = plan.prologue.run(examples)
            if not isinstance(gathered, Mismatch):
                return self._used(plan), gathered
            reasons.setdefault(plan.kind, gathered.reason)
        return reasons

    def heard(
        self, key: Hashable, examples: Sequence[torch.Tensor], *, counts: bool
    ) -> frozenset[tuple[str, ...]]:
        """Return what a call's inputs answer otherwise than its plans; calls that agree in it are alike.

        Args:
            key: what tells the call apart by its inputs' kinds.
            examples: the tensors among these.
            counts: True if numbers are alike, since they may be symbols.
        """
        others = (plan.answers.other(examples) for plan in self._plans if plan.key == key)
        return frozenset(other.kind(counts=counts) for other in others if other is not None)

    def alike(self, key: Hashable) -> list[CachedPlan]:
        """Return the plans for calls with such inputs, the one used last first."""
        return [plan for plan in reversed(self._plans) if plan.key == key and self._has_layouts(plan)]

    def _used(self, plan: CachedPlan) -> CachedPlan:
        self._plans.remove(plan)
        self._plans.append(plan)
        plan.uses += 1
        return plan

    def _has_layouts(self, plan: CachedPlan) -> bool:
        """Return True unless the last backward of this kind received gradients in other layouts."""
        strides = self.gradient_strides(plan.key, plan.kind)
        return not strides or plan.executor.step.captured.tangent_strides == strides

    def gradient_strides(self, key: Hashable, kind: Hashable) -> Strides:
        """Return the layouts to plan a kind of call for; empty for those of the outputs."""
        # Most loops hand gradients in as outputs lie, and hashing a kind of call takes an operator's time.
        return self._gradient_strides.get((key, kind), ()) if self._gradient_strides else ()

    def note_gradient_strides(self, plan: CachedPlan, strides: Strides) -> None:
        """Note in which layouts a backward received its gradients."""
        if strides == plan.executor.step.captured.tangent_strides:
            return
        if any((cached.key, cached.kind) == (plan.key, plan.kind) for cached in self._plans):
            self._gradient_strides[plan.key, plan.kind] = strides

    def add(self, plan: CachedPlan) -> None:
        """Add a plan; the one that was not used for longest goes if there are too many."""
        self._plans.append(plan)
        self._keep(self._plans[-self.limit :])

    def clear(self) -> None:
        """Forget all plans."""
        self._keep([])

    def drop_lost(self) -> bool:
        """Forget plans for tensors or modules that the model no longer has, as after ``.to(dtype)``.

        A plan holds on to its modules, and they to their parameters.

        Returns:
            True if there were any.
        """
        before = len(self._plans)
        self._keep([plan for plan in self._plans if not plan.prologue.lost()])
        return len(self._plans) < before

    def _keep(self, plans: list[CachedPlan]) -> None:
        self._plans = plans
        keys = {(plan.key, plan.kind) for plan in plans}
        self._gradient_strides = {
            key: strides for key, strides in self._gradient_strides.items() if key in keys
        }
