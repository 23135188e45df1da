"""How much an operator computes and moves, by its fake tensors.

Floating-point operations are those of ``torch.utils.flop_counter`` for matrix products, convolutions and
attention, with formulas of our own where it has none or errs: its backward of a grouped convolution counts
every channel with every other. All other operators count as moving memory alone.

Bytes are read and written once for each tensor. A view counts with the elements that it has, an expanded one
with those that exist. Exceptions are operators that look up rows of a table, that overwrite without reading,
and that pass over an array twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from olla_fx import operators
from olla_fx.fx_graph import given_arguments, is_marker, is_on, is_written
from olla_fx.torch_compat import OpOverload, plain_name, pytree, storage_key

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator does.

    Attributes:
        flops: floating-point operations of products; 0 if it has none.
        dtype: in which they are done.
        moved_bytes: read and written.
    """

    flops: int
    dtype: torch.dtype
    moved_bytes: int


NO_WORK = Work(0, torch.float32, 0)


def work_of(node: fx.Node, device: torch.device) -> Work:
    """Return what an operator does.

    Args:
        node: an operator of a graph that was propagated with fake tensors.
        device: tensors elsewhere count nothing.
    """
    if is_marker(node) or node.target is operators.filled_:
        return NO_WORK
    tensors = _Tensors.of(node, device)
    return Work(_flops(node), _computing_type(tensors), _moved_bytes(node, tensors))


@dataclass(frozen=True)
class _Tensors:
    """The tensors of an operator on its device, each once."""

    read: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    made: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, node: fx.Node, device: torch.device) -> _Tensors:
        read: dict[object, torch.Tensor] = {}
        written: dict[object, torch.Tensor] = {}
        for given, reads, writes in _arguments(node):
            for tensor in _tensors_of(given, device):
                if reads:
                    read[_place(tensor)] = tensor
                if writes:
                    written[_place(tensor)] = tensor
        known = {storage_key(tensor) for tensor in (*read.values(), *written.values())}
        results = {_place(tensor): tensor for tensor in _tensors_of(node.meta.get("val"), device)}
        made = tuple(tensor for tensor in results.values() if storage_key(tensor) not in known)
        return cls(tuple(read.values()), tuple(written.values()), made)


def _arguments(node: fx.Node) -> Iterator[tuple[object, bool, bool]]:
    """Yield each argument's value, whether the operator reads it, and whether it writes to it."""
    if not isinstance(node.target, OpOverload):
        for argument in node.all_input_nodes:
            yield argument.meta.get("val"), True, False
        return
    overwrites = plain_name(node.target) in _OVERWRITING
    for argument, given in given_arguments(node):
        writes = is_written(argument)
        yield fake_value(given), not argument.is_out and not (writes and overwrites), writes


def fake_value(argument: Any) -> Any:
    """Return an argument of a node with the fake values in the place of nodes."""
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    return fx.node.map_arg(argument, lambda node: node.meta.get("val"))


def _tensors_of(value: object, device: torch.device) -> Iterator[torch.Tensor]:
    for leaf in [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and is_on(leaf, device):
            yield leaf


def _place(tensor: torch.Tensor) -> object:
    return storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements that a tensor has in memory."""
    extents = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return min(math.prod(extents) * tensor.element_size(), tensor.untyped_storage().nbytes())


def _computing_type(tensors: _Tensors) -> torch.dtype:
    """Return the type of the first argument or result with fractions."""
    everything = (*tensors.read, *tensors.made, *tensors.written)
    return next((tensor.dtype for tensor in everything if tensor.is_floating_point()), torch.float32)


_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_"}
)
"""Operators that do not read what they write to."""

_MAKING_NOTHING = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
"""Operators whose results nobody has written yet."""

_LOOKING_UP = frozenset(
    {
        "embedding", "embedding_update_", "nll_loss_forward", "nll_loss2d_forward", "gather", "index",
        "_unsafe_index", "index_select", "take", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_",
        "index_add_", "index_copy_", "index_fill_",
    }
)  # fmt: skip
"""Operators that touch those elements of their first tensor that indices name."""

_READ_TWICE = {
    "native_batch_norm": 1, "_native_batch_norm_legit": 1, "_batch_norm_with_update": 1,
    "cudnn_batch_norm": 1, "miopen_batch_norm": 1, "native_group_norm": 1,
    "native_batch_norm_backward": 2, "batch_norm_backward": 2, "cudnn_batch_norm_backward": 2,
    "native_group_norm_backward": 2,
}  # fmt: skip
"""Operators that sum up before they write, each with how many of its first tensors it reads a second time."""


def _moved_bytes(node: fx.Node, tensors: _Tensors) -> int:
    name = plain_name(node.target)
    if name in _MAKING_NOTHING:
        return 0
    everything = [*tensors.read, *tensors.written, *tensors.made]
    sizes = [touched_bytes(tensor) for tensor in everything]
    if name in _LOOKING_UP and len(sizes) > 1:
        table = _place(everything[0])
        others = (size for tensor, size in zip(everything, sizes, strict=True) if _place(tensor) != table)
        most = max(others, default=0)
        sizes = [
            min(size, most) if _place(tensor) == table else size
            for tensor, size in zip(everything, sizes, strict=True)
        ]
    return sum(sizes) + sum(sizes[: _READ_TWICE.get(name, 0)])


def _flops(node: fx.Node) -> int:
    if not isinstance(node.target, OpOverload):
        return 0
    name = plain_name(node.target)
    in_place = name.endswith("_")
    packet: Any = getattr(aten, name[:-1], None) if in_place else node.target.overloadpacket
    formula = _FORMULAS.get(packet) or flop_registry.get(_COUNTED_AS.get(packet, packet))
    if formula is None:
        return 0
    arguments = [fake_value(argument) for argument in node.args]
    keywords = {name: fake_value(argument) for name, argument in node.kwargs.items()}
    return int(formula(*arguments, **keywords, out_val=node.meta.get("val")))


def _convolution_backward(gradient: Any, tensor: Any, weight: Any, *arguments: Any, **_: Any) -> int:
    """Count the products of forward once for each of the two gradients that are wanted."""
    transposed, wanted = arguments[4], arguments[7]
    places = (tensor if transposed else gradient).shape[2:]
    products = math.prod(places) * tensor.shape[0] * math.prod(weight.shape)
    return int(2 * products * (bool(wanted[0]) + bool(wanted[1])))


def _grouped_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    rows = left.shape[-2] if left.dim() > right.dim() else left.numel() // left.shape[-1]
    return int(2 * rows * left.shape[-1] * right.shape[-1])


def _lstm(tensor: Any, weight: Any, recurrent_weight: Any, *_: Any, **__: Any) -> int:
    places = math.prod(tensor.shape[:-1])
    return int(2 * places * (weight.numel() + recurrent_weight.numel()))


def _linear(tensor: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * tensor.numel() * weight.shape[0])


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward,
    aten.linear: _linear,
    aten._grouped_mm: _grouped_product,
    operators.grouped_mm.overloadpacket: _grouped_product,
    operators.lstm_layer.overloadpacket: _lstm,
    # The gradients of the input and of the weights.
    operators.lstm_layer_backward.overloadpacket: lambda *given, **named: 2 * _lstm(*given, **named),
}

_COUNTED_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators that compute what another one does, under whose name the products are counted."""
