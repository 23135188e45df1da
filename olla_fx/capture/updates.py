"""Traces an optimizer's update of one parameter of each kind, and repeats it in the graph for the others.

Tracing takes some milliseconds an operator, and an update has ten operators for each parameter, in a Llama as
many as forward. Parameters are of one kind if the optimizer's code can see no difference between them: they
are in one group, and layouts and types of parameter, gradient and state are equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.capture.optimizer import SUPPORTED, run_update
from olla_fx.guards import OptimizerLayout
from olla_fx.torch_compat import TracedNodes, storage_key


def trace_updates(
    optimizer: torch.optim.Optimizer,
    layout: OptimizerLayout,
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor | None],
    state: Mapping[str, dict[str, torch.Tensor]],
    scalars: Mapping[str, Any],
) -> None:
    """Trace the update of all parameters; see :func:`olla_fx.capture.optimizer.run_update` for the arguments.

    The steps of ``torch.optim`` treat parameters one after the other, in their single-tensor form. Subclasses
    may do something else beside, and hyper-parameters of single parameters differ between them: their updates
    are traced for all parameters.
    """
    if type(optimizer) not in SUPPORTED or any(slot.parameter for slot in layout.scalars):
        run_update(optimizer, layout, parameters, gradients, state, scalars)
        return
    written = [*parameters.values(), *(tensor for own in state.values() for tensor in own.values())]
    static = {storage_key(tensor) for tensor in written}
    traced: dict[Hashable, TracedNodes] = {}
    for index, names in enumerate(layout.parameters):
        for name in names:
            gradient = gradients.get(name)
            if gradient is None:
                continue
            tensors = [gradient, parameters[name], *state[name].values()]
            # A gradient in the memory of a parameter changes when that is updated.
            kind = None if storage_key(gradient) in static else _kind_of(index, tensors, state[name])
            known = traced.get(kind)
            if known is not None:
                torch_compat.repeat_nodes(known, tensors)
                continue
            with torch_compat.nodes_traced_for(tensors) as nodes:
                alone = replace(
                    layout,
                    parameters=tuple((name,) if at == index else () for at in range(len(layout.parameters))),
                )
                run_update(optimizer, alone, parameters, {name: gradient}, {name: state[name]}, scalars)
            if kind is not None and nodes.can_be_repeated and nodes.before[0] is nodes.after[0]:
                traced[kind] = nodes


def _kind_of(group: int, tensors: list[torch.Tensor], state: Mapping[str, torch.Tensor]) -> Hashable | None:
    """Return what the optimizer's code can see of a parameter; None if its sizes are symbols."""
    layouts = [
        (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
        for tensor in tensors
    ]
    if any(type(number) is not int for shape, stride, *_ in layouts for number in (*shape, *stride)):
        return None
    return group, tuple(layouts), tuple(state)
