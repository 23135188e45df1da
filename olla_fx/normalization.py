"""Batch normalisation a second time, from the statistics that the first run has kept: an operator of a graph.

Eager's backward keeps each channel's mean and inverse deviation anyway. From these, a normalisation is made
again in one pass over its input, with an activation that clamps (ReLU, ReLU6, hardtanh) in the same pass.
ATen's operators would take the mean and the variance anew and then clamp what they have written: five passes.

The kernel (``normalization.h``) rounds as ATen's do on processors that contract products and sums, whatever
the shape; :meth:`olla_fx.passes.rewrites.probes.Probe.equal_from_statistics` asks whether they do here.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from olla_fx.kernels import cpu_kernels
from olla_fx.operators import define_new

aten = torch.ops.aten

_TRAINING_AT = {aten._native_batch_norm_legit.default: 5, aten._native_batch_norm_legit.no_stats: 3}
"""Batch norms, each with the place of the argument that says whether it takes its statistics of the input."""

_CLAMPS = {
    aten.relu: (0.0, math.inf),
    aten.relu_: (0.0, math.inf),
    aten.hardtanh: (-1.0, 1.0),
    aten.hardtanh_: (-1.0, 1.0),
}
"""Activations, each with its limits unless others are given."""


def _is_channels_last(tensor: torch.Tensor) -> bool | None:
    """Return whether a tensor lies in channels-last order, or is contiguous; None if neither."""
    if tensor.is_contiguous():
        return False
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders.get(tensor.dim())
    return True if order is not None and tensor.is_contiguous(memory_format=order) else None


def _run(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    least: float,
    most: float,
) -> torch.Tensor:
    kernels, channels_last = cpu_kernels(), _is_channels_last(tensor)
    if kernels is None or channels_last is None:
        raise RuntimeError("batch_norm_again needs olla_fx's kernels, and a dense tensor")
    result = torch.empty_like(tensor)
    batch, channels = tensor.shape[:2]
    inner = math.prod(tensor.shape[2:])
    kernels.normalize_again(
        batch * (inner if channels_last else channels),
        channels,
        inner,
        channels_last,
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        mean.data_ptr(),
        inverse.data_ptr(),
        least,
        most,
        tensor.data_ptr(),
        result.data_ptr(),
    )
    return result


def _fake(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


batch_norm_again = define_new(
    "batch_norm_again",
    "(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor inverse, float least, float most)"
    " -> Tensor",
    _run,
    _fake,
)


@dataclass(frozen=True)
class Again:
    """What makes the result of a batch norm, or of the activation behind it, a second time.

    Attributes:
        target: the operator.
        args: its arguments, nodes of the graph of the first run and numbers.
        source: the fake value of its input, for the probe.
    """

    target: Any
    args: tuple[Any, ...]
    source: torch.Tensor


def normalized_again(norm: fx.Node, activation: fx.Node | None = None) -> Again | None:
    """Return what makes a batch norm's first result again from its others.

    Args:
        norm: a node with its fake value.
        activation: what reads that result and nothing else, or writes over it; None for the norm alone.

    Returns:
        None if the two are of another kind, or their types and layouts are not the kernel's.
    """
    if norm.target not in _TRAINING_AT or norm.args[_TRAINING_AT[norm.target]] is not True:
        return None
    results = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
    limits = (-math.inf, math.inf) if activation is None else _limits(activation, results.get(0))
    source, weight, bias = norm.args[:3]
    values = [item.meta["val"] for item in (source, weight, bias) if isinstance(item, fx.Node)]
    if limits is None or not {1, 2} <= results.keys():
        return None
    if any(value.dtype != torch.float32 or value.device.type != "cpu" for value in values):
        return None
    if _is_channels_last(values[0]) is None or not all(value.is_contiguous() for value in values[1:]):
        return None
    if norm.meta["val"][0].stride() != values[0].stride():
        return None
    return Again(batch_norm_again, (source, weight, bias, results[1], results[2], *limits), values[0])


def clamp_while_normalizing(graph: fx.Graph) -> None:
    """Let a batch norm that is made again clamp its result, too, where only a clamp reads that."""
    for node in graph.find_nodes(op="call_function", target=batch_norm_again):
        readers = list(node.users)
        limits = _limits(readers[0], node) if len(readers) == 1 else None
        if limits is not None and node.args[-2:] == (-math.inf, math.inf):
            node.args = (*node.args[:-2], *limits)
            readers[0].replace_all_uses_with(node)
            graph.erase_node(readers[0])


def _limits(activation: fx.Node, normalized: fx.Node | None) -> tuple[float, float] | None:
    """Return between which numbers an activation leaves its argument as it is; None if it does more."""
    packet = getattr(activation.target, "overloadpacket", None)
    if packet not in _CLAMPS or activation.args[0] is not normalized or activation.kwargs:
        return None
    given = list(activation.args[1:])
    defaults: list[Any] = list(_CLAMPS[packet])
    least, most = given + defaults[len(given) :]
    if not isinstance(least, int | float) or not isinstance(most, int | float) or least > most:
        return None
    exact = all(float(torch.tensor(limit, dtype=torch.float32)) == limit for limit in (least, most))
    return (float(least), float(most)) if exact else None
