"""Wraps operators of ATen that a graph's plain call would run in another way than eager.

**oneDNN's LSTM.** The forward keeps what its backward needs (its workspace) only while gradients are enabled,
which they are not when a planned step runs. The backward returns one tensor as the gradients of both biases,
though its fake form makes two: here they are one result.

**Grouped products** (mixtures of experts). Their fake form has the checks of the CUDA kernel, which takes
bfloat16 alone, and refuses what the CPU's kernel computes.

**Products with a dropout's mask on the CPU**, forward and backward. ATen's kernels make a copy of the mask as
numbers, and a result for each of two products. Here that copy becomes the result.

The gradient lies in memory as the incoming one does; ATen's fake form tells the layout of the CUDA kernel.

**Nonzero.** The number of its results depends on data; here it is an argument, asked for before a call.

**An embedding's gradient in blocks of rows**: the tokens of other rows count as padding.

**An embedding's update**, of the rows that were looked up alone.

**Backwards of poolings** read of the tensor that was pooled how it lies in memory alone. Here that is an
argument, so that the tensor need not be kept.

**Filled**: a tensor whose parts were written one by one.

These run the operators of ATen, so that the bits are eager's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from olla_fx import torch_compat
from olla_fx.torch_compat import schema_of

aten = torch.ops.aten
_library = torch.library.Library("olla_fx", "DEF")  # type: ignore[no-untyped-call]
_FIRST_BIAS, _SECOND_BIAS = 3, 4


def define_new(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Iterable[torch.Tag] = ()
) -> Any:
    """Define an operator with a schema of its own.

    Args:
        name: in the namespace ``olla_fx``, with that of an overload behind a point if there is one.
        schema: without the name.
        run: what it does on every device.
        fake: what it returns on fake tensors.
        tags: of the operator.
    """
    _library.define(f"{name}{schema}", tags=tuple(tags))  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"olla_fx::{name}", fake, lib=_library)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.olla_fx, packet), overload or "default")


def _define(
    name: str, original: Any, run: Callable[..., Any], fake: Callable[..., Any], results: str | None = None
) -> Any:
    """Define an operator with arguments and tags of ``original``, and its results unless others are given."""
    arguments, returned = str(schema_of(original)).split(" -> ")
    schema = f"{arguments[arguments.index('(') :]} -> {results or returned}"
    return define_new(name, schema, run, fake, original.tags)


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
dropout_backward = _define(
    "dropout_backward", aten.native_dropout_backward.default, _run_dropout_backward, _run_dropout_backward
)


def _nonzero_sized(tensor: torch.Tensor, count: int) -> torch.Tensor:
    indices: torch.Tensor = aten.nonzero.default(tensor)
    if indices.shape[0] != count:
        raise RuntimeError(f"a mask has {indices.shape[0]} ones, and the step was captured for {count}")
    return indices


def _fake_nonzero_sized(tensor: torch.Tensor, count: int) -> torch.Tensor:
    # The kernels write each dimension's positions in a row.
    return tensor.new_empty_strided((count, tensor.dim()), (1, count), dtype=torch.int64)


nonzero_sized = define_new(
    "nonzero_sized", "(Tensor self, SymInt count) -> Tensor", _nonzero_sized, _fake_nonzero_sized
)


def _define_by_shape(original: Any) -> Any:
    """Define the backward of a pooling with shape and strides in the place of the pooled tensor."""
    into: Any = original.overloadpacket.grad_input

    def fake(
        gradient: torch.Tensor, self_size: Sequence[int], self_stride: Sequence[int], *_: Any
    ) -> torch.Tensor:
        return gradient.new_empty_strided(self_size, self_stride)

    def run(
        gradient: torch.Tensor, self_size: Sequence[int], self_stride: Sequence[int], *arguments: Any
    ) -> torch.Tensor:
        # The kernel asks the pooled tensor for its layout, which is that of the result.
        result = gradient.new_empty_strided(self_size, self_stride)
        return cast(torch.Tensor, into(gradient, result, *arguments, grad_input=result))

    schema = str(schema_of(original)).removeprefix("aten::")
    name = f"{schema.split('(')[0]}_by_shape"
    arguments = schema[schema.index("(") :].replace("Tensor self", "SymInt[] self_size, SymInt[] self_stride")
    return define_new(name, arguments, run, fake)


def _embedding_rows_backward(
    gradient: torch.Tensor, tokens: torch.Tensor, start: int, end: int, padding_idx: int
) -> torch.Tensor:
    rows = end - start
    moved = tokens - start
    others = (moved < 0).logical_or_(moved >= rows)
    if padding_idx >= 0:
        others.logical_or_(tokens == padding_idx)
    moved.masked_fill_(others, rows)
    # Padding needs a row, as its number must be one.
    sums: torch.Tensor = aten.embedding_dense_backward.default(gradient, moved, rows + 1, rows, False)
    return sums[:-1]


def _fake_embedding_rows_backward(
    gradient: torch.Tensor, tokens: torch.Tensor, start: int, end: int, padding_idx: int
) -> torch.Tensor:
    return gradient.new_empty((end - start + 1, gradient.shape[-1]))[:-1]


embedding_rows_backward = define_new(
    "embedding_rows_backward",
    "(Tensor grad_output, Tensor indices, int start, int end, int padding_idx) -> Tensor",
    _embedding_rows_backward,
    _fake_embedding_rows_backward,
)


def _update_embedding(
    table: torch.Tensor, gradient: torch.Tensor, tokens: torch.Tensor, padding_idx: int, alpha: float
) -> torch.Tensor:
    if not (math.copysign(1.0, alpha) < 0 and math.isfinite(alpha)):
        rows = table.shape[0]
        whole = aten.embedding_dense_backward.default(gradient, tokens, rows, padding_idx, False)
        return table.add_(whole, alpha=alpha)
    tokens = tokens.reshape(-1).long()
    gradient = gradient.reshape(-1, table.shape[1])
    # The same token has the same number among those that are there, and numbers grow with tokens: kernels
    # that sort keep their sequence.
    ordered, places = tokens.sort(stable=True)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=starts[1:])
    numbers = torch.empty_like(tokens).scatter_(0, places, starts.cumsum(0).sub_(1))
    ignored = tokens.numel()
    if padding_idx >= 0:
        numbers.masked_fill_(tokens == padding_idx, ignored)
    sums: torch.Tensor = aten.embedding_dense_backward.default(gradient, numbers, ignored + 1, ignored, False)
    # A token that is there twice gets the same row twice.
    updated = table.index_select(0, tokens).add_(sums.index_select(0, numbers), alpha=alpha)
    return table.index_copy_(0, tokens, updated)


embedding_update_ = define_new(
    "embedding_update_",
    "(Tensor(a!) self, Tensor grad_output, Tensor indices, int padding_idx, Scalar alpha) -> Tensor(a!)",
    _update_embedding,
    lambda table, *_: table,
)


POOLING_BACKWARDS: Mapping[Any, Any] = {
    original: _define_by_shape(original)
    for original in (
        aten.max_pool2d_with_indices_backward.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten.avg_pool2d_backward.default,
        aten.avg_pool3d_backward.default,
    )
}
"""Backwards of poolings, each with the operator that takes shape and strides instead of the pooled tensor."""


filled_ = define_new(
    "filled_",
    "(Tensor(a!) self, Tensor[] parts) -> Tensor(a!)",
    lambda whole, _: whole,
    lambda whole, _: whole,
)
"""Returns a tensor as it is once its parts were written, on which it depends: what reads it comes after."""


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
