"""Masks of a bit for each element, and what makes and reads them: operators of a graph, for the CPU.

ATen's masks have a byte for each element. What a dropout has kept, and where a ReLU is 0, needs a bit, in the
sequence in which elements lie in memory. A mask is never unpacked: its readers (``masks.h``) compute each
element as ATen's do with truth values. A dropout draws its truth values by ATen's kernel, and packs them at
once. Tensors are dense, of 32 bits, and those of one mask lie in memory alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from olla_fx.draws import drawn_again
from olla_fx.kernels import CpuKernels, cpu_kernels
from olla_fx.operators import define_new


def _kernels() -> CpuKernels:
    kernels = cpu_kernels()
    if kernels is None:
        raise RuntimeError("packed masks need olla_fx's kernels, which cannot be built")
    return kernels


def _empty_mask(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.new_empty(-(-tensor.numel() // 8), dtype=torch.uint8)


def _compare(tensor: torch.Tensor, threshold: float) -> torch.Tensor:
    packed = _empty_mask(tensor)
    _kernels().compare(tensor.data_ptr(), threshold, packed.data_ptr(), tensor.numel())
    return packed


def _fill(tensor: torch.Tensor, packed: torch.Tensor, result: torch.Tensor | None = None) -> torch.Tensor:
    result = torch.empty_like(tensor) if result is None else result
    _kernels().fill(tensor.data_ptr(), packed.data_ptr(), result.data_ptr(), tensor.numel())
    return result


def _draw(size: Sequence[int], stride: Sequence[int], p: float) -> torch.Tensor:
    mask = torch.empty_strided(size, stride, dtype=torch.bool).bernoulli_(1.0 - p)
    packed = _empty_mask(mask)
    _kernels().pack(mask.data_ptr(), packed.data_ptr(), mask.numel())
    return packed


def _empty_drawn(size: Sequence[int], *_: Any) -> torch.Tensor:
    return torch.empty(-(-math.prod(size) // 8), dtype=torch.uint8)


def _scale(
    tensor: torch.Tensor, packed: torch.Tensor, factor: float, result: torch.Tensor | None = None
) -> torch.Tensor:
    result = torch.empty_like(tensor) if result is None else result
    _kernels().scale(tensor.data_ptr(), packed.data_ptr(), factor, result.data_ptr(), tensor.numel())
    return result


packed_le = define_new("packed_le", "(Tensor self, float threshold) -> Tensor", _compare, _empty_mask)
"""Of numbers, the bits of those up to a threshold."""

packed_dropout_mask = define_new(
    "packed_dropout_mask",
    "(SymInt[] size, SymInt[] stride, float p) -> Tensor",
    _draw,
    _empty_drawn,
    (torch.Tag.nondeterministic_seeded,),
)
"""Bits of what a dropout keeps of a dense tensor."""

packed_dropout_mask_drawn_again = drawn_again(packed_dropout_mask)

_ELEMENT_WISE = (torch.Tag.pointwise,)

packed_fill = define_new(
    "packed_fill",
    "(Tensor self, Tensor packed) -> Tensor",
    _fill,
    lambda tensor, *_: torch.empty_like(tensor),
    _ELEMENT_WISE,
)
"""Numbers, and 0 where a bit is set."""

packed_fill_ = define_new(
    "packed_fill_",
    "(Tensor(a!) self, Tensor packed) -> Tensor(a!)",
    lambda tensor, packed: _fill(tensor, packed, tensor),
    lambda tensor, *_: tensor,
    _ELEMENT_WISE,
)

packed_dropout_backward = define_new(
    "packed_dropout_backward",
    "(Tensor self, Tensor packed, float scale) -> Tensor",
    _scale,
    lambda tensor, *_: torch.empty_like(tensor),
    _ELEMENT_WISE,
)
"""Numbers whose bit is set, times the scale; all others times 0."""

packed_dropout_backward_ = define_new(
    "packed_dropout_backward_",
    "(Tensor(a!) self, Tensor packed, float scale) -> Tensor(a!)",
    lambda tensor, packed, factor: _scale(tensor, packed, factor, tensor),
    lambda tensor, *_: tensor,
    _ELEMENT_WISE,
)
