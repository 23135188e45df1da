"""Reads hooks of modules, tensors and optimizers, and calls the optimizers' inner functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_GLOBAL_HOOKS = (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _global_backward_hooks,
    _global_backward_pre_hooks,
)

MODULE_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that hold its own hooks."""

_tensor_hooks_of = attrgetter("_backward_hooks")
_accumulation_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def module_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return all forward and backward hooks that run for one module, global ones included."""
    own = module.__dict__
    tables = (*_GLOBAL_HOOKS, *(own[name] for name in MODULE_HOOK_TABLES))
    return [hook for table in tables for hook in table.values()]


def any_global_module_hooks() -> bool:
    """Return True if forward or backward hooks are registered for all modules."""
    return any(_GLOBAL_HOOKS)


def tensor_hooks(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has gradient hooks."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def any_tensor_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if any of the tensors has gradient hooks."""
    return any(map(_tensor_hooks_of, tensors)) or any(map(_accumulation_hooks_of, tensors))


def has_optimizer_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if hooks would run before ``optimizer.step`` reads the gradients."""
    return bool(optimizer._optimizer_step_pre_hooks) or bool(_global_optimizer_pre_hooks)


def run_optimizer_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks that ``optimizer.step`` runs last."""
    hooks = (
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    )
    for hook in hooks:
        hook(optimizer, (), {})


def note_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, as its wrapped ``step`` would."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def optimizer_step_function(optimizer_type: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``step`` of an optimizer class without profiler, hook and scheduler wrappers."""
    step: Callable[..., Any] = inspect.unwrap(optimizer_type.step)
    return step


def initialize_optimizer_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Create the state of a group's parameters as ``optimizer.step`` itself would.

    Every optimizer of ``torch.optim`` fills lists that its step works on in ``_init_group`` and creates
    missing state on the way; the lists are thrown away here.
    """
    init_group: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
    lists: list[list[Any]] = [[] for _ in range(len(inspect.signature(init_group).parameters) - 1)]
    init_group(group, *lists)
