"""Excludes functions from Dynamo, and runs its graphs without a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import fx
from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


_RUN_AS_IT_IS = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def not_compiled(function: _Function) -> _Function:
    """Return a function that Dynamo neither compiles nor traces; it would else compile our planning.

    ``torch.compiler.disable`` asks a dozen questions at every call. Where Dynamo is not at work, one will do.
    """
    left_alone: Any = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(left_alone)
    def call(*args: Any, **kwargs: Any) -> Any:
        if eval_frame.get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        return left_alone(*args, **kwargs)

    call.__dict__.update(left_alone.__dict__)  # Dynamo reads there that it is to leave the function alone
    eval_frame.set_code_exec_strategy(cast(Any, call).__code__, _RUN_AS_IT_IS)
    return cast(_Function, call)


def run_unplanned(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs a graph of Dynamo's as AOTAutograd does, without a plan.

    Not the graph itself: checkpoints in it would recompute with other random numbers than they drew.
    """
    from torch._dynamo.backends import debugging

    compiled: Callable[..., Any] = debugging.aot_eager(graph_module, list(inputs))
    return compiled
