"""The backend that runs a graph of Dynamo's without a plan of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


def run_unplanned(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What runs a graph of Dynamo's as AOTAutograd does, without a plan of ours.

    Not the graph itself: checkpoints in it would recompute with other random numbers than they drew.
    """
    from torch._dynamo.backends import debugging

    compiled: Callable[..., Any] = debugging.aot_eager(graph_module, list(inputs))
    return compiled
