"""Reads the tables in which modules keep parameters, buffers and children."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

NORM_TYPE: Any = nn.modules.batchnorm._NormBase
"""Base of the norms that may keep running statistics."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Returns a module's own parameters by name; None for those that were registered as None."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Returns a module's children by name; None for those that were registered as None."""


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's own parameters and buffers, each with its name, but none that is None."""
    tables = module._parameters.items(), module._buffers.items()
    return [(name, tensor) for table in tables for name, tensor in table if tensor is not None]


def share_tables(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the very dictionaries of another one's parameters, buffers and children."""
    module._parameters, module._buffers = other._parameters, other._buffers
    module._modules = other._modules


def refresh_weight_list(module: nn.RNNBase) -> None:
    """Put a recurrent module's present parameters into the list that it keeps of them."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def call_itself(module: nn.Module, /, *inputs: Any, **named: Any) -> Any:
    """Call a module past whatever is called in its place, such as what ``nn.Module.compile`` made of it.

    Args:
        module: the user's.
        inputs: in sequence.
        named: by name.
    """
    function: Callable[..., Any] = module if module._compiled_call_impl is None else module._call_impl
    return function(*inputs, **named)


def called_instead(module: nn.Module) -> Callable[..., Any] | None:
    """Return what is called in a module's place; None if it is called itself."""
    return module._compiled_call_impl


def call_instead(module: nn.Module, function: Callable[..., Any] | None) -> None:
    """Let something be called in a module's place, beneath nothing but ``module(...)`` itself.

    Args:
        module: the user's.
        function: takes what the module takes; None to let the module be called itself.
    """
    if function is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = function
