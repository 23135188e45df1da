"""Makes the plan of a call: compiles its step, and puts together what the plan's calls need.

Which plan a call is to have (for numbers alone, with symbols, for all sizes) is decided before, by
:mod:`olla_fx.run.plans`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from olla_fx.capture import Mode, StepRequest
from olla_fx.capture import optimizer as optimizers
from olla_fx.compile import compile_step
from olla_fx.compiled import CompiledStep, CompileRequest
from olla_fx.guards import Prologue
from olla_fx.guards.writes import Place
from olla_fx.run.calls import Call
from olla_fx.run.changing import specs_of
from olla_fx.run.cuda_graph import GraphedStep, check_graph_request
from olla_fx.run.executor import Executor
from olla_fx.run.plan_cache import CachedPlan, Strides


class PlanMaker:
    """Makes the plans of one module.

    Attributes:
        request: what the module is for, without inputs.
    """

    def __init__(self, request: StepRequest) -> None:
        """Begin without having seen anything written.

        Args:
            request: what the module is for; its inputs are not kept.
        """
        self._numbers: dict[str, Any] = {}
        self.request = replace(request, inputs=(), numbers=self._numbers)
        self._written: frozenset[Place] = frozenset()

    def hold(self, call: Call) -> None:
        """Let guards and graphs find the numbers among a call's inputs."""
        self._numbers.clear()
        self._numbers.update(call.numbers)

    def forget_answers(self) -> None:
        """Forget what is known of the first example: it says nothing about later inputs."""
        self.request = replace(self.request, answers={})

    def step_request(self, call: Call, kind: tuple[Mode, Hashable], strides: Strides) -> StepRequest:
        """Return the request for the step of a call.

        Args:
            call: its inputs.
            kind: its mode, and the modules' training flags.
            strides: in which layouts gradients come back to its outputs.
        """
        return replace(
            self.request,
            inputs=call.inputs,
            mode=kind[0],
            tangent_strides=strides,
            written_before=self._written,
        )

    def compiled(self, request: CompileRequest) -> tuple[CompiledStep, CompiledStep | None]:
        """Compile a step; see :func:`olla_fx.compile.compile_step`."""
        step, update = compile_step(request)
        if self.request.options.cuda_graph:
            check_graph_request(request.step, step.captured.device)
        return step, update

    def sees_new_writes(self, step: CompiledStep) -> bool:
        """Note what a step's forward writes; return True if plans that were made before do not look at it."""
        places = step.captured.writes.places
        if places <= self._written:
            return False
        self._written |= places
        return True

    def plan_of(
        self, call: Call, kind: tuple[Mode, Hashable], step: CompiledStep, update: CompiledStep | None
    ) -> CachedPlan:
        """Return a plan with what its calls need.

        Args:
            call: that it was made for.
            kind: of this call.
            step: for it.
            update: after micro-batches, if it is a step of its own.
        """
        # It is compiled: what was captured of it is not needed again.
        step = replace(step, captured=replace(step.captured, update=None))
        planned = CachedPlan(
            call.key, kind, *self._runners(step), self.prologue_of(step), specs_of(call.inputs)
        )
        if update is not None:
            executor, graphed = self._runners(update)
            planned = replace(planned, update=replace(planned, executor=executor, graphed=graphed))
        return planned

    def prologue_of(self, step: CompiledStep) -> Prologue:
        """Return what gathers the inputs of a step, and tells if it still fits the model."""
        own = self.request
        return Prologue(
            step.captured.assumptions,
            own.model,
            own.loss_fn,
            own.optimizer,
            optimizers.initial_state,
            differentiates=own.mode is Mode.AUTOGRAD and torch.is_grad_enabled(),
        )

    def _runners(self, step: CompiledStep) -> tuple[Executor, GraphedStep | None]:
        # Only the user's objects: plans are made again from the compile request, without its inputs.
        executor = Executor(CompileRequest(self.request), step)
        graphed = GraphedStep(step.captured, executor) if self.request.options.cuda_graph else None
        return executor, graphed
