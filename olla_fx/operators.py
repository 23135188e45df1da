"""Wraps operators of ATen that a graph's plain call would run in another way than eager.

**oneDNN's LSTM.** The forward keeps what its backward needs (its workspace) only while gradients are enabled,
which they are not when a planned step runs. The backward returns one tensor as the gradients of both biases,
though its fake form makes two: here they are one result.

**Grouped products** (mixtures of experts). Their fake form has the checks of the CUDA kernel, which takes
bfloat16 alone, and refuses what the CPU's kernel computes.

**Dropout on the CPU.** ATen's kernels multiply numbers by a mask of truth values, for which they make a copy
of the mask as numbers, and a result for each product. Here that copy becomes the result.

The gradient lies in memory as the incoming one does; ATen's fake form tells the layout of the CUDA kernel.

**Nonzero.** The number of its results depends on data; here it is an argument, asked for before a call.

These run the operators of ATen, so that the bits are eager's. Two more read and set the state of a device's
random generator, by which a graph draws a second time what it drew before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from olla_fx import torch_compat
from olla_fx.torch_compat import schema_of

aten = torch.ops.aten
_library = torch.library.Library("olla_fx", "DEF")  # type: ignore[no-untyped-call]
_FIRST_BIAS, _SECOND_BIAS = 3, 4


def _define(
    name: str, original: Any, run: Callable[..., Any], fake: Callable[..., Any], results: str | None = None
) -> Any:
    """Define an operator with arguments and tags of ``original``, and its results unless others are given."""
    arguments, returned = str(schema_of(original)).split(" -> ")
    _library.define(  # type: ignore[no-untyped-call]
        f"{name}{arguments[arguments.index('(') :]} -> {results or returned}", tags=tuple(original.tags)
    )
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"olla_fx::{name}", fake, lib=_library)
    return getattr(torch.ops.olla_fx, name).default


def _run_lstm(*arguments: Any) -> Any:
    with torch.enable_grad(), torch_compat.below_autograd():
        return aten.mkldnn_rnn_layer.default(*arguments)


def _run_lstm_backward(*arguments: Any) -> Any:
    gradients = aten.mkldnn_rnn_layer_backward.default(*arguments)
    return *gradients[:_SECOND_BIAS], *gradients[_SECOND_BIAS + 1 :]


lstm_layer = _define("lstm_layer", aten.mkldnn_rnn_layer.default, _run_lstm, aten.mkldnn_rnn_layer.default)
lstm_layer_backward = _define(
    "lstm_layer_backward",
    aten.mkldnn_rnn_layer_backward.default,
    _run_lstm_backward,
    _run_lstm_backward,
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _fake_grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the product of each group: of every matrix of a stack, or every part that ``offs`` cuts."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape.insert(0, left.shape[0] if offs is None else offs.shape[0])
    dtype = out_dtype or left.dtype
    # Rows begin at multiples of 16 bytes, as CUDA's kernel requires and the CPU's makes them.
    elements = 16 // dtype.itemsize
    row = -(-shape[-1] // elements) * elements
    strides = [shape[-2] * row, row, 1][-len(shape) :]
    return left.new_empty_strided(shape, strides, dtype=dtype)


grouped_mm = _define(
    "grouped_mm", aten._grouped_mm.default, aten._grouped_mm.default, _fake_grouped_mm, "Tensor"
)


def _scaled_where(mask: torch.Tensor, tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``tensor * mask * scale``, computed in the memory of one result."""
    result = mask.to(tensor.dtype)
    return torch.mul(tensor, result, out=result).mul_(scale)


def _run_dropout(tensor: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or not tensor.numel():
        result: tuple[torch.Tensor, torch.Tensor] = aten.native_dropout.default(tensor, p, train)
        return result
    kept = 1.0 - p
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(kept)
    return _scaled_where(mask, tensor, 1.0 / kept if kept else 0.0), mask


def _run_dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return _scaled_where(mask, gradient, scale)


def _fake_native_dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return gradient * mask


native_dropout_backward = _define(
    "native_dropout_backward",
    aten.native_dropout_backward.default,
    aten.native_dropout_backward.default,
    _fake_native_dropout_backward,
)
dropout = _define("dropout", aten.native_dropout.default, _run_dropout, _run_dropout)
dropout_backward = _define(
    "dropout_backward", aten.native_dropout_backward.default, _run_dropout_backward, _run_dropout_backward
)


def _nonzero_sized(tensor: torch.Tensor, count: int) -> torch.Tensor:
    found: torch.Tensor = aten.nonzero.default(tensor)
    if found.shape[0] != count:
        raise RuntimeError(f"a mask has {found.shape[0]} ones, and the step was captured for {count}")
    return found


def _fake_nonzero_sized(tensor: torch.Tensor, count: int) -> torch.Tensor:
    # The kernels write each dimension's positions in a row.
    return tensor.new_empty_strided((count, tensor.dim()), (1, count), dtype=torch.int64)


_library.define("nonzero_sized(Tensor self, SymInt count) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("nonzero_sized", _nonzero_sized, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("olla_fx::nonzero_sized", _fake_nonzero_sized, lib=_library)
nonzero_sized = torch.ops.olla_fx.nonzero_sized.default


def _define_generator_operator(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Define an operator on the state of a generator; its tag keeps it in order among random draws."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"olla_fx::{name}", fake, lib=_library)
    return getattr(torch.ops.olla_fx, name).default


def _read_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _fake_state(device: torch.device) -> torch.Tensor:
    size = _CUDA_STATE_BYTES if device.type == "cuda" else _CPU_STATE_BYTES
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _set_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


_CPU_STATE_BYTES = torch.get_rng_state().numel()
_CUDA_STATE_BYTES = 16
"""The seed and the offset."""

random_state = _define_generator_operator(
    "random_state", "(Device device) -> Tensor", _read_state, _fake_state
)
set_random_state = _define_generator_operator(
    "set_random_state", "(Tensor state, Device device) -> ()", _set_state, lambda *_: None
)

_UNDER_OWN_NAME = {
    aten._grouped_mm.default: grouped_mm,
    aten.native_dropout_backward.default: native_dropout_backward,
}


def under_own_name(operator: Any, arguments: Sequence[Any]) -> Any:
    """Return what to trace in the place of an operator whose fake form refuses what eager computes, or errs.

    Args:
        operator: of ATen.
        arguments: of its call.
    """
    if operator is aten.native_dropout_backward.default and arguments[0].device.type != "cpu":
        return operator
    return _UNDER_OWN_NAME.get(operator, operator)


def with_both_bias_gradients(gradients: Any) -> tuple[torch.Tensor, ...]:
    """Return the results of ``mkldnn_rnn_layer_backward`` from those of :data:`lstm_layer_backward`."""
    bias = gradients[_FIRST_BIAS]
    return *gradients[:_SECOND_BIAS], bias.clone(), *gradients[_SECOND_BIAS:]
