"""The pipeline: capture → rewrite → dataflow → order → place → validate → emit → run.

:func:`plan` stops before emitting and needs no memory; :func:`optimize` returns a module that runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from olla_fx import arena, torch_compat
from olla_fx.capture import CapturedStep, Mode, Recipe, StepRequest, capture
from olla_fx.capture.eager import eager_baseline
from olla_fx.capture.optimizer import warn_about_fused
from olla_fx.dataflow import Dataflow, build_dataflow
from olla_fx.disk_cache import cached_plan
from olla_fx.errors import CaptureError
from olla_fx.passes import rewrite
from olla_fx.plan import Plan
from olla_fx.run import MOST_PLANS, Compile, CompiledStep, Executor, PlannedModule, SharedBuffer
from olla_solvers.ilp import backends
from olla_solvers.plan import MemoryPlan
from olla_solvers.planner import make_plan
from olla_solvers.problem import Problem

LossFunction = Callable[..., torch.Tensor]


def optimize(
    model: nn.Module,
    example_input: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mode: str = "auto",
    solver: str = "auto",
    time_limit: float | None = None,
    return_outputs: bool = False,
    micro_batches: int = 1,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    most_plans: int = MOST_PLANS,
    cuda_graph: bool = False,
) -> PlannedModule:
    """Plan a model's step and return a module that runs it in one buffer.

    Nothing runs on real data here. The first call of the result is a real step, recorded; from the
    second on, the final plan is in force, workspaces included.

    Args:
        model: any ``nn.Module``; not changed.
        example_input: a tensor, or a tuple of the model's positional arguments; with ``loss_fn`` the last
            one is the target, and the step is ``loss_fn(model(*inputs), target)``.
        loss_fn: gives a scalar from outputs and target. With it the whole training step is planned.
        optimizer: over the model's parameters; its update is part of the training step.
        mode: ``auto`` (by ``model.training``), ``inference`` or ``training``.
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` (the integer programs really run), or ``none``.
        time_limit: seconds for ordering and placing; None: as long as it pays, at most about 30 s.
        return_outputs: return ``(loss, outputs)`` instead of the loss.
        micro_batches: of a whole training step: cut the batch along its first dimension into so many
            parts, whose gradients accumulate; the loss is the mean of theirs.
        clip_grad_norm: of a whole training step: scale the trained parameters' gradients down to this norm.
        clip_grad_value: of a whole training step: limit each element of the gradients to this magnitude.
        most_plans: how many kinds of calls (shapes of inputs, mostly) to keep plans for.
        cuda_graph: launch the settled step as one CUDA graph. A graph bakes Python's numbers, so optimizers
            other than SGD need ``capturable=True`` and a tensor as learning rate. Where capturing fails,
            the step runs without one and says why.

    Returns:
        A module that shares the model's parameters and ``state_dict`` keys. With ``loss_fn`` and
        ``optimizer`` call it as the example was given: ``loss = step(x, y)``. Without them, and with the
        model in training mode, it stands for the model in a loop of your own: ``loss_fn(module(x),
        y).backward()``, forward and backward planned together.

    Raises:
        CaptureError: when the step cannot be captured; model and optimizer are untouched.
        SolverUnavailableError: when the solver is unknown or not installed.
        OptionError: when ``time_limit`` is no number of seconds.
    """
    backends.check_options(solver, time_limit)
    request = _request(model, example_input, loss_fn, optimizer, mode, return_outputs)
    request = _with_recipe(request, Recipe(micro_batches, clip_grad_norm, clip_grad_value))
    if optimizer is not None:
        warn_about_fused(optimizer)

    options = plan_options(solver=solver, time_limit=time_limit)
    return PlannedModule(request, options, most_plans, cuda_graph)


def plan(
    model: nn.Module,
    example_input: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mode: str = "auto",
    solver: str = "auto",
    time_limit: float | None = None,
    return_outputs: bool = False,
    micro_batches: int = 1,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    baseline: bool = True,
) -> Plan:
    """Plan a model's step under fake tensors: nothing runs and no memory is needed.

    Models and examples on the meta device are planned as if on the CPU.

    Args:
        model: see :func:`optimize`, like all arguments below but the last.
        example_input: a tensor or a tuple of the model's arguments, the target last.
        loss_fn: gives a scalar from outputs and target.
        optimizer: over the model's parameters.
        mode: ``auto``, ``inference`` or ``training``.
        solver: ``auto``, ``cbc``, ``gurobi``, ``highs`` or ``none``.
        time_limit: seconds for ordering and placing.
        return_outputs: plan for returning the outputs, too.
        micro_batches: parts of the batch whose gradients accumulate.
        clip_grad_norm: plan for clipping the gradients by their norm.
        clip_grad_value: plan for clipping them by value.
        baseline: also follow an eager step under fake tensors, to say what it would need.

    Returns:
        The plan of the arrays; workspaces are known only once a real step was recorded.

    Raises:
        CaptureError: when the step cannot be captured.
        SolverUnavailableError: when the solver is unknown or not installed.
        OptionError: when ``time_limit`` is no number of seconds.
    """
    backends.check_options(solver, time_limit)
    request = _request(model, example_input, loss_fn, optimizer, mode, return_outputs)
    request = _with_recipe(request, Recipe(micro_batches, clip_grad_norm, clip_grad_value))
    captured, dataflow, timings = _front(request)
    memory = make_plan(dataflow.problem, solver=solver, time_limit=time_limit)
    eager = eager_baseline(request) if baseline else None
    return Plan(dataflow.problem, memory, eager, {**timings, **memory.timings}, captured.recomputed)


def plan_options(*, solver: str = "auto", time_limit: float | None = None) -> Compile:
    """What captures and plans requests, with checked options.

    Args:
        solver: see :func:`optimize`.
        time_limit: see :func:`optimize`.

    Raises:
        SolverUnavailableError: when the solver is unknown or not installed.
        OptionError: when ``time_limit`` is no number of seconds.
    """
    backends.check_options(solver, time_limit)
    return _Compiler(solver, time_limit)


@dataclass(frozen=True)
class _Compiler:
    """Captures and plans a request, with the options of :func:`optimize`."""

    solver: str
    time_limit: float | None

    def __call__(self, request: StepRequest, buffer: SharedBuffer) -> CompiledStep:
        captured, dataflow, timings = _front(request)

        def plan_problem(problem: Problem) -> MemoryPlan:
            options = {"solver": self.solver, "time_limit": self.time_limit}
            return cached_plan(problem, options, captured.device, lambda: self._plan(problem))

        executor = Executor(dataflow, plan_problem(dataflow.problem), captured.inputs, plan_problem, buffer)

        def describe(current: Executor) -> Plan:
            seconds = {**timings, **current.plan.timings, "emit": current.emit_seconds}
            build_seconds = arena.build_seconds()
            if build_seconds is not None:
                seconds["build"] = build_seconds
            return Plan(current.problem, current.plan, None, seconds, captured.recomputed)

        return CompiledStep(captured, executor, describe)

    def _plan(self, problem: Problem) -> MemoryPlan:
        return make_plan(problem, solver=self.solver, time_limit=self.time_limit)


def _front(request: StepRequest) -> tuple[CapturedStep, Dataflow, dict[str, float]]:
    """Capture, rewrite and read the dataflow; with the seconds of each."""
    torch_compat.warn_if_newer_than_tested()
    captured = capture(request)
    started = time.perf_counter()
    graph_module, _ = rewrite(captured)
    dataflow = build_dataflow(graph_module, captured.device)
    return (
        captured,
        dataflow,
        {"capture": captured.seconds, "rewrite": time.perf_counter() - started},
    )


def _with_recipe(request: StepRequest, recipe: Recipe) -> StepRequest:
    if recipe != Recipe() and request.mode is not Mode.TRAINING:
        raise CaptureError(
            "micro_batches, clip_grad_norm and clip_grad_value are parts of a whole training step: give "
            "loss_fn and optimizer, too, or do this in your own loop"
        )
    return replace(request, recipe=recipe)


def _request(
    model: nn.Module,
    example_input: Any,
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer | None,
    mode: str,
    return_outputs: bool,
) -> StepRequest:
    """Check the arguments once, at the door."""
    if mode not in ("auto", Mode.INFERENCE, Mode.TRAINING):
        raise CaptureError(f"unknown mode {mode!r}: one of auto, inference, training")
    training = model.training if mode == "auto" else mode == Mode.TRAINING
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    if not training:
        if loss_fn is not None or optimizer is not None:
            raise CaptureError(
                "loss_fn and optimizer make a training step, but the model is in eval mode: call "
                "model.train() first, or leave them out"
            )
        if model.training:
            raise CaptureError("mode='inference' plans model.eval(): call it first")
        return StepRequest(model, inputs, Mode.INFERENCE)
    if not model.training:
        raise CaptureError("mode='training' plans model.train(): call it first")
    if loss_fn is None and optimizer is None:
        return StepRequest(model, inputs, Mode.AUTOGRAD)
    if loss_fn is None or optimizer is None:
        raise CaptureError(
            "a whole training step needs both loss_fn and optimizer: olla_fx.optimize(model, (x, y), "
            "loss_fn=..., optimizer=...). Leave both out to keep your own loop, or call model.eval() for "
            "inference"
        )
    if len(inputs) < 2:
        raise CaptureError("with loss_fn, example_input is a tuple whose last element is the target: (x, y)")
    return StepRequest(model, inputs, Mode.TRAINING, loss_fn, optimizer, return_outputs)
