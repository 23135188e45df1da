"""The two entry points: :func:`optimize` returns a module that runs, :func:`plan` only its figures.

Both check their arguments and call the pipeline, :func:`olla_fx.compile.compile_step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from olla_fx.capture import Mode, StepRequest
from olla_fx.capture.arguments import in_sequence, takes_by_name
from olla_fx.capture.eager import follow_eager
from olla_fx.capture.optimizer import warn_about_fused
from olla_fx.capture.values.questions import known_answers
from olla_fx.compile import compile_step
from olla_fx.compiled import CompileRequest, plan_of
from olla_fx.costs import profile_by_name
from olla_fx.errors import CaptureError, UnsupportedOptimizerError
from olla_fx.options import Options, changed_options
from olla_fx.progress import Progress
from olla_fx.run import PlannedModule
from olla_fx.step_plan import Plan

LossFunction = Callable[..., torch.Tensor]


def optimize(
    model: nn.Module,
    example_input: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    options: Options | None = None,
    **changes: Any,
) -> PlannedModule:
    """Plan a model's step and return a module that runs it in one buffer.

    The model's mode and the arguments decide what is planned: an inference of ``model.eval()``; with
    ``loss_fn`` and ``optimizer`` a whole training step; else forward and backward in a loop of your own.

    Nothing runs on real data here. The first call of the result is a real step, recorded; from the
    second on, the final plan is in force, workspaces included.

    Args:
        model: any ``nn.Module``; not changed.
        example_input: a tensor, a tuple of the model's positional arguments, or a dictionary of arguments by
            name; with ``loss_fn`` a tuple whose last element is the target, and the step is
            ``loss_fn(model(*inputs), target)``.
        loss_fn: gives a scalar from outputs and target. With it the whole training step is planned.
        optimizer: over the model's parameters; its update is part of the training step.
        options: how to plan and run the step.
        changes: single options by keyword: ``solver``, ``time_limit``, ``return_outputs``,
            ``accumulation_steps``, ``clip_grad_norm``, ``clip_grad_value``, ``fallback``, ``dynamic``,
            ``rewrites``, ``recompute``, ``memory_budget``, ``swap``, ``link``, ``loss_chunks``,
            ``cache_size_limit``, ``cuda_graph``; see :class:`olla_fx.Options`.

    Returns:
        A module that shares the model's parameters and ``state_dict`` keys. With ``loss_fn`` and
        ``optimizer`` call it as the example was given: ``loss = step(x, y)``. Without them, and with the
        model in training mode, it stands for the model in a loop of your own: ``loss_fn(module(x),
        y).backward()``, forward and backward planned together.

    Raises:
        CaptureError: if the step cannot be captured, or an argument is none of its kind; model and optimizer
            are untouched.
        BudgetError: if no plan within the memory budget is found.
        OptionError: if an option is unknown or its value makes no sense.
        SwapError: if ``swap=True`` is given where there is no link to measure.
        SolverUnavailableError: if the solver is unknown or not installed.
    """
    request = _request(model, example_input, loss_fn, optimizer, changed_options(options, changes))
    if optimizer is not None:
        warn_about_fused(optimizer)
    return PlannedModule(request)


def plan(
    model: nn.Module,
    example_input: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    baseline: bool = True,
    device_profile: str | None = None,
    options: Options | None = None,
    **changes: Any,
) -> Plan:
    """Plan a model's step under fake tensors: nothing runs and no memory is needed.

    Models and examples on the meta device are planned as if on the CPU.

    Args:
        model: see :func:`optimize`, like ``loss_fn`` and ``optimizer``.
        example_input: see :func:`optimize`.
        loss_fn: gives a scalar from outputs and target.
        optimizer: over the model's parameters.
        baseline: also follow an eager step under fake tensors, to say what it would need.
        device_profile: a name among :data:`olla_fx.costs.PROFILES` (``a100``, ``h100``, ``h200``, ``cpu``):
            what operators take there decides what is recomputed. None for the model's own device.
        options: how to plan the step.
        changes: single options by keyword, as for :func:`optimize`.

    Returns:
        The plan of the arrays; workspaces are known only once a real step was recorded.

    Raises:
        CaptureError: if the step cannot be captured.
        BudgetError: if no plan within the memory budget is found.
        OptionError: if an option is unknown or its value makes no sense.
        SwapError: if ``swap=True`` is given where there is no link to measure.
        SolverUnavailableError: if the solver is unknown or not installed.
    """
    request = _request(model, example_input, loss_fn, optimizer, changed_options(options, changes))
    profile = None if device_profile is None else profile_by_name(device_profile)
    with Progress() as progress:
        step, update = compile_step(CompileRequest(request, runs=False, progress=progress, profile=profile))
        planned = plan_of(step, update)
        if not baseline:
            return planned
        progress.begin("eager baseline")
        answered = replace(request, answers=known_answers(step.captured.questions))
        return replace(planned, baseline=follow_eager(answered).baseline())


def _request(
    model: nn.Module,
    example_input: Any,
    loss_fn: LossFunction | None,
    optimizer: torch.optim.Optimizer | None,
    options: Options,
) -> StepRequest:
    """Check the arguments once, at the door."""
    _check_kinds(model, loss_fn, optimizer)
    whole_step = loss_fn is not None or optimizer is not None
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    if isinstance(example_input, Mapping) and not whole_step and takes_by_name(model, example_input):
        inputs = in_sequence(model, (), example_input)
    if whole_step and not model.training:
        raise CaptureError(
            "loss_fn and optimizer make a training step, but the model is in eval mode: call "
            "model.train() first, or leave them out"
        )
    if whole_step and (loss_fn is None or optimizer is None):
        raise CaptureError(
            "a whole training step needs both loss_fn and optimizer: olla_fx.optimize(model, (x, y), "
            "loss_fn=..., optimizer=...). Leave both out to keep your own loop, or call model.eval() for "
            "inference"
        )
    if whole_step and len(inputs) < 2:
        raise CaptureError("with loss_fn, example_input is a tuple whose last element is the target: (x, y)")
    if options.changes_gradients and not whole_step:
        raise CaptureError(
            "accumulation_steps, clip_grad_norm and clip_grad_value are parts of a whole training step: give "
            "loss_fn and optimizer, too, or do this in your own loop"
        )
    mode = Mode.TRAINING if whole_step else Mode.AUTOGRAD if model.training else Mode.INFERENCE
    return StepRequest(model, inputs, mode, loss_fn, optimizer, options)


def _check_kinds(model: object, loss_fn: object, optimizer: object) -> None:
    """Refuse what is no model, loss or optimizer: say what was given and what to give.

    Raises:
        CaptureError: for the model or the loss.
        UnsupportedOptimizerError: for the optimizer.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"model is {_named(model)}: {_advice_on_model(model)}")
    if isinstance(loss_fn, type):
        raise CaptureError(f"loss_fn is {_named(loss_fn)}: give an object of it, {loss_fn.__name__}(...)")
    if loss_fn is not None and not callable(loss_fn):
        raise CaptureError(
            f"loss_fn is {_named(loss_fn)}: give a function or a module that is called as loss_fn(outputs, "
            "target), such as torch.nn.CrossEntropyLoss()"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        advice = _advice_on_optimizer(optimizer)
        raise UnsupportedOptimizerError(f"optimizer is {_named(optimizer)}: {advice}")


def _named(given: object) -> str:
    """Return words for an argument of the wrong kind: ``the class SGD``."""
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    name = getattr(given, "__qualname__", None)
    if name is not None and inspect.isroutine(given):
        return f"the {'method' if inspect.ismethod(given) else 'function'} {name!r}"
    return f"of type {type(given).__name__}"


def _advice_on_model(model: object) -> str:
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"give an object of it, {model.__name__}(...)"
    if isinstance(model, list | tuple):
        return "give an nn.Module, such as torch.nn.Sequential(*layers)"
    if inspect.isroutine(model):
        return "give an nn.Module whose forward calls it, so that parameters are found"
    return "give an nn.Module"


def _advice_on_optimizer(optimizer: object) -> str:
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        return "give the scheduler's optimizer, and call scheduler.step() in your loop as before"
    if isinstance(optimizer, type):
        return f"give an object of it, {optimizer.__name__}(...) over model.parameters()"
    if isinstance(optimizer, list | tuple | Mapping):
        return (
            "a step has one; give one with several parameter groups, or leave loss_fn and optimizer out and "
            "call each in your own loop"
        )
    return "give one of torch.optim, such as torch.optim.SGD(model.parameters(), lr=0.1)"
