"""Masks of a bit for each element, and what makes and reads them: operators of a graph, for the CPU.

ATen's masks have a byte for each element. What a dropout has kept, and where a ReLU is 0, needs a bit, in the
sequence in which elements lie in memory. A mask is never unpacked: its readers (``masks.h``) compute each
element as ATen's do with truth values. A dropout draws its truth values by ATen's kernel, and packs them at
once. Tensors are dense, of 32 bits, and those of one mask lie in memory alike.
"""

from __future__ import annotations

from typing import Any

import torch

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


def _empty_drop(tensor: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(tensor), _empty_mask(tensor)


def _drop(tensor: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    kept = 1.0 - rate
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(kept)
    result, packed = _empty_drop(tensor, rate)
    _kernels().drop(
        tensor.data_ptr(),
        mask.data_ptr(),
        1.0 / kept if kept else 0.0,
        result.data_ptr(),
        packed.data_ptr(),
        tensor.numel(),
    )
    return result, packed


def _scale(
    tensor: torch.Tensor, packed: torch.Tensor, factor: float, result: torch.Tensor | None = None
) -> torch.Tensor:
    result = torch.empty_like(tensor) if result is None else result
    _kernels().scale(tensor.data_ptr(), packed.data_ptr(), factor, result.data_ptr(), tensor.numel())
    return result


packed_le = define_new("packed_le", "(Tensor self, float threshold) -> Tensor", _compare, _empty_mask)
"""Of numbers, the bits of those up to a threshold."""

packed_dropout = define_new(
    "packed_dropout",
    "(Tensor input, float p) -> (Tensor, Tensor)",
    _drop,
    _empty_drop,
    (torch.Tag.nondeterministic_seeded,),
)
"""A dropout in training, with the bits of what it has kept."""

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
