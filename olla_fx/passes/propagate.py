"""Recomputes every node's fake value, so that shared storages show the graph as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from olla_fx import torch_compat
from olla_fx.capture import StepInput


class _Propagator(fx.Interpreter):
    """Runs a graph on fake tensors and keeps each node's value."""

    def __init__(self, root: nn.Module, graph: fx.Graph, fake_mode: Any) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self._fake_mode = fake_mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant of the graph as a fake tensor: views of it must share its storage."""
        constant = super().get_attr(target, args, kwargs)
        if isinstance(constant, torch.Tensor):
            return self._fake_mode.from_tensor(constant, static_shapes=True)
        return constant

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and keep its value."""
        value = super().run_node(n)
        n.meta["val"] = value
        return value


def propagate_fake_tensors(
    root: nn.Module, graph: fx.Graph, inputs: Sequence[StepInput], device: torch.device
) -> None:
    """Set ``meta["val"]`` of every node, from scratch.

    Late-bound scalars are the number 0.5: shapes and storages do not depend on them.

    Args:
        root: has the constants of the graph.
        graph: changed in its metadata only.
        inputs: of its placeholders.
        device: the device that it is to run on.
    """
    fake_mode = torch_compat.new_fake_mode()
    for node in graph.nodes:
        node.meta.pop("val", None)
    with fake_mode, torch.no_grad():
        arguments = [step_input.stand_in(device) for step_input in inputs]
        _Propagator(root, graph, fake_mode).run(*arguments)
