"""Max-pooling that notes the places of its maxima in few bits: operators of a graph, for the CPU.

ATen's kernels return each maximum's place in its plane, in 64 bits. These return its place in its window, in
2, 4 or 8 bits, as many as a byte takes beside each other. Their own kernels (``pooling.h``) compare numbers
in ATen's sequence, and add up gradients in it, so that all bits are the same.

In channels-last order the channels of a place begin with a byte, otherwise a row of maxima does. ATen's
kernel for channels-last volumes leaves the place of a maximum to chance if all of its window is ``-inf``, so
that these are not for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla_fx.kernels import CpuKernels, Dimension, cpu_kernels
from olla_fx.operators import define_new
from olla_fx.torch_compat import schema_of

aten = torch.ops.aten

TYPES = torch.float32, torch.float64
BITS = 2, 4, 8
"""Widths of a place. In 8 bits, places take a byte for each maximum, whatever the sizes."""

_DEFAULTS = (), 0, 1, False
"""Of stride, padding, dilation and ``ceil_mode``."""

_ADDED = "int bits, bool channels_last"
_BY_SHAPE = "Tensor self", "SymInt[] self_size, SymInt[] self_stride"


def complete(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a max-pooling, behind the tensor, with those that a call has left out."""
    return *arguments, *_DEFAULTS[len(arguments) - 1 :]


def bits_of(arguments: Sequence[Any], dimensions: int) -> int | None:
    """Return the bits that a place needs, among :data:`BITS`; None if these are more.

    Args:
        arguments: of a max-pooling, behind the tensor.
        dimensions: of a plane.
    """
    places = math.prod(_each(arguments[0], dimensions))
    return next((bits for bits in BITS if places <= 2**bits), None)


def _each(given: Sequence[int] | int, dimensions: int) -> tuple[int, ...]:
    """Return an argument for each dimension: one number stands for all."""
    numbers = tuple(given) if isinstance(given, Sequence) else (given,)
    return numbers * (dimensions if len(numbers) == 1 else 1)


@dataclass(frozen=True)
class _Pooling:
    """A max-pooling of a tensor.

    Attributes:
        dimensions: of a plane, with those that it lacks in front.
        planes: their number.
        inner: elements beside each other at each place of a plane.
        bits: of a place.
    """

    dimensions: tuple[Dimension, ...]
    planes: int
    inner: int
    bits: int

    @classmethod
    def of(cls, shape: Sequence[int], count: int, arguments: Sequence[Any]) -> _Pooling:
        """Return the pooling of a tensor of some shape, with planes of ``count`` dimensions."""
        kernel, step, padding, dilation, rounds_up, bits, channels_last = arguments
        plane = shape[-count:]
        windows = zip(
            plane,
            _each(kernel, count),
            _each(step or kernel, count),
            _each(padding, count),
            _each(dilation, count),
            strict=True,
        )
        own = [(*numbers, _windows(numbers, rounds_up)) for numbers in windows]
        outer = shape[:-count]
        inner = outer[-1] if channels_last else 1
        lacking: list[Dimension] = [(1, 1, 1, 0, 1, 1)] * (3 - count)
        return cls((*lacking, *own), math.prod(outer) // max(inner, 1), inner, bits)

    def maxima_of(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the shape of the result."""
        return *shape[:-count], *(dimension[-1] for dimension in self.dimensions[-count:])

    @property
    def places(self) -> tuple[int, int]:
        """The shape of the packed places: rows, and bytes of each."""
        *outer, width = (dimension[-1] for dimension in self.dimensions)
        rows, length = self.planes * math.prod(outer), width
        if self.inner > 1:
            rows, length = rows * width, self.inner
        return rows, -(-length * self.bits // 8)


def _windows(numbers: tuple[int, int, int, int, int], rounds_up: bool) -> int:
    """Return the number of windows in one dimension, of which none begins behind the plane."""
    size, extent, step, padding, dilation = numbers
    room = size + 2 * padding - dilation * (extent - 1) - 1
    if not rounds_up:
        return room // step + 1
    count = -(-room // step) + 1
    return count - ((count - 1) * step >= size + padding)


def _dense(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    order = torch.channels_last if channels_last else torch.contiguous_format
    return tensor.contiguous(memory_format=order)


def _kernels() -> CpuKernels:
    kernels = cpu_kernels()
    if kernels is None:
        raise RuntimeError("max-pooling with packed places needs olla_fx's kernels, which cannot be built")
    return kernels


def _define_forward(name: str, schema: str, count: int) -> Any:
    def results(tensor: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooling = _Pooling.of(tensor.shape, count, arguments)
        *_, channels_last = arguments
        order = torch.channels_last if channels_last else torch.contiguous_format
        shape = pooling.maxima_of(tensor.shape, count)
        maxima = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=order)
        return maxima, tensor.new_empty(math.prod(pooling.places), dtype=torch.uint8)

    def run(tensor: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooling = _Pooling.of(tensor.shape, count, arguments)
        *_, bits, channels_last = arguments
        source = _dense(tensor, channels_last)
        maxima, places = results(tensor, *arguments)
        _kernels().max_pool(
            pooling.dimensions, pooling.inner, bits, pooling.planes, *_addresses(source, maxima, places)
        )
        return maxima, places

    return define_new(name, f"({schema}, {_ADDED}) -> (Tensor, Tensor)", run, results)


def _define_backward(name: str, schema: str, count: int) -> Any:
    def result(
        gradient: torch.Tensor, self_size: Sequence[int], self_stride: Sequence[int], *_: Any
    ) -> torch.Tensor:
        return gradient.new_empty_strided(self_size, self_stride)

    def run(
        gradient: torch.Tensor, self_size: Sequence[int], self_stride: Sequence[int], *arguments: Any
    ) -> torch.Tensor:
        *own, places, bits, channels_last = arguments
        pooling = _Pooling.of(self_size, count, (*own, bits, channels_last))
        above = _dense(gradient, channels_last)
        spread = result(gradient, self_size, self_stride)
        _kernels().max_pool_backward(
            pooling.dimensions, pooling.inner, bits, pooling.planes, *_addresses(above, places, spread)
        )
        return spread

    return define_new(name, f"({schema.replace(*_BY_SHAPE)}, {_ADDED}) -> Tensor", run, result)


def _addresses(*tensors: torch.Tensor) -> tuple[int, int, int, bool]:
    """Return where tensors lie, and whether the first has 64 bits."""
    first, second, third = (tensor.data_ptr() for tensor in tensors)
    return first, second, third, tensors[0].dtype == torch.float64


def _packed(operator: Any, dimensions: int, define: Callable[[str, str, int], Any]) -> Any:
    """Define the packed form of one of ATen's operators."""
    name, _, arguments = str(schema_of(operator)).removeprefix("aten::").partition("(")
    without_defaults = re.sub("=[^,]+", "", arguments.rpartition(") -> ")[0])
    return define(f"{name}_packed", without_defaults, dimensions)


DIMENSIONS: Mapping[Any, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
}
"""ATen's poolings that have a packed form, each with the dimensions of a plane."""

PACKED: Mapping[Any, Any] = {
    pooling: _packed(pooling, dimensions, _define_forward) for pooling, dimensions in DIMENSIONS.items()
}
"""Each pooling with its packed form.

That has two more arguments: the bits of a place, and whether tensors lie in channels-last order. If not, they
are contiguous.
"""

PACKED_BACKWARD: Mapping[Any, Any] = {
    backward: _packed(backward, dimensions, _define_backward)
    for backward, dimensions in (
        (aten.max_pool2d_with_indices_backward.default, 2),
        (aten.max_pool3d_with_indices_backward.default, 3),
    )
}
"""Each pooling's backward with its packed form, which takes shape and strides instead of what was pooled."""


def has_packed_form(tensor: torch.Tensor, arguments: Sequence[Any], dimensions: int) -> bool:
    """Return True if a pooling can return packed places.

    Args:
        tensor: what is pooled.
        arguments: complete ones.
        dimensions: of a plane.
    """
    _, _, padding, dilation, _ = arguments
    # With both, windows may lie in the padding altogether, and ATen's place of their maximum outside of them.
    is_simple = not any(_each(padding, dimensions)) or set(_each(dilation, dimensions)) == {1}
    is_here = tensor.device.type == "cpu" and tensor.dtype in TYPES
    return is_here and is_simple and bits_of(arguments, dimensions) is not None
