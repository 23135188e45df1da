"""Excludes functions from Dynamo, and runs its graphs without a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Return a function that Dynamo neither compiles nor traces; it would else compile our planning."""
    left_alone: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left_alone


def run_unplanned(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs a graph of Dynamo's as AOTAutograd does, without a plan.

    Not the graph itself: checkpoints in it would recompute with other random numbers than they drew.
    """
    from torch._dynamo.backends import debugging

    compiled: Callable[..., Any] = debugging.aot_eager(graph_module, list(inputs))
    return compiled
