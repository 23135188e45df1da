"""Tells which sizes of a step's inputs vary from call to call, and how shapes and strides follow from these.

Two dimensions are one size only if they were equal in every call seen: lengths of a text and of its labels,
but not a batch and a length that happened to be equal once. Strides follow from the sizes: each is a number,
or the extent times the stride of another dimension, as in every call seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olla_fx.guards import TensorSpec

LEAST = 2
"""Sizes of 0 and 1 are special everywhere in PyTorch: they broadcast, and hold no gap."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A number times some of the sizes that vary.

    Attributes:
        factor: the number.
        sizes: indices of the sizes; one may occur more than once.
    """

    factor: int
    sizes: tuple[int, ...] = ()

    def of(self, values: Sequence[Any]) -> Any:
        """Return the product for some sizes, which may be symbols."""
        product: Any = self.factor
        for size in self.sizes:
            product = product * values[size]
        return product

    def times(self, other: Extent) -> Extent:
        """Return the product of two."""
        return Extent(self.factor * other.factor, tuple(sorted((*self.sizes, *other.sizes))))


@dataclass(frozen=True, slots=True)
class VaryingTensor:
    """Shape and element strides of a tensor, as far as they vary."""

    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]

    def empty(self, values: Sequence[Any], like: TensorSpec) -> torch.Tensor:
        """Return a new tensor of this shape and layout; under fake tensors ``values`` may be symbols."""
        shape = [extent.of(values) for extent in self.shape]
        stride = [extent.of(values) for extent in self.stride]
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class VaryingSizes:
    """The sizes of a step's inputs that vary.

    Attributes:
        hints: the value of each in the call that is captured.
        tensors: the tensors among the inputs, flat.
    """

    hints: tuple[int, ...]
    tensors: tuple[VaryingTensor, ...]

    def read(self, tensors: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, ...] | None:
        """Return the sizes of a call; None if its tensors have others than these could be.

        Args:
            tensors: shape and stride of each.
        """
        values: list[int | None] = [None] * len(self.hints)
        for varying, (shape, _) in zip(self.tensors, tensors, strict=True):
            if len(varying.shape) != len(shape):
                return None
            for extent, given in zip(varying.shape, shape, strict=True):
                for size in extent.sizes:
                    values[size] = given
        if any(value is None or value < LEAST for value in values):
            return None
        for varying, (shape, stride) in zip(self.tensors, tensors, strict=True):
            pairs = zip((*varying.shape, *varying.stride), (*shape, *stride), strict=True)
            if any(extent.of(values) != number for extent, number in pairs):
                return None
        return tuple(value for value in values if value is not None)

    def without(self, fixed: Sequence[int]) -> VaryingSizes:
        """Return the same with some of the sizes as numbers.

        Args:
            fixed: indices of these.
        """
        kept = [index for index in range(len(self.hints)) if index not in fixed]

        def without(extent: Extent) -> Extent:
            factor = math.prod(
                (self.hints[size] for size in extent.sizes if size in fixed), start=extent.factor
            )
            return Extent(factor, tuple(kept.index(size) for size in extent.sizes if size not in fixed))

        tensors = (
            VaryingTensor(tuple(map(without, tensor.shape)), tuple(map(without, tensor.stride)))
            for tensor in self.tensors
        )
        return VaryingSizes(tuple(self.hints[index] for index in kept), tuple(tensors))


def varying_sizes(calls: Sequence[Sequence[TensorSpec]]) -> VaryingSizes | None:
    """Compare the tensors of several calls.

    Args:
        calls: the tensors among the inputs of each, flat; the last call is the one to capture.

    Returns:
        None if no size varies, or something else does.
    """
    if not calls or len({len(call) for call in calls}) != 1:
        return None
    symbols: dict[tuple[int, ...], int] = {}
    tensors: list[VaryingTensor] = []
    for specs in zip(*calls, strict=True):
        kinds = {(len(spec.shape), spec.dtype, spec.device, spec.requires_grad) for spec in specs}
        if len(kinds) != 1:
            return None
        shape = tuple(
            _extent(values, symbols) for values in zip(*(spec.shape for spec in specs), strict=True)
        )
        stride = strides_in([(spec.shape, spec.stride) for spec in specs], shape)
        if stride is None:
            return None
        tensors.append(VaryingTensor(shape, stride))
    if not symbols or any(min(values) < LEAST for values in symbols):
        return None
    return VaryingSizes(tuple(values[-1] for values in symbols), tuple(tensors))


def all_sizes(specs: Sequence[TensorSpec]) -> VaryingSizes | None:
    """Return the sizes of inputs all of which may vary, but 0 and 1; equal ones are one size.

    Args:
        specs: the tensors among the inputs of the one call that was seen.

    Returns:
        None if there are none, or a stride follows from no extents.
    """
    symbols: dict[int, int] = {}
    tensors: list[VaryingTensor] = []
    for spec in specs:
        shape = tuple(
            Extent(size) if size < LEAST else Extent(1, (symbols.setdefault(size, len(symbols)),))
            for size in spec.shape
        )
        stride = strides_in([(spec.shape, spec.stride)], shape)
        if stride is None:
            return None
        tensors.append(VaryingTensor(shape, stride))
    return VaryingSizes(tuple(symbols), tuple(tensors)) if symbols else None


def sizes_as_they_are(specs: Sequence[TensorSpec]) -> VaryingSizes:
    """Return the sizes of inputs none of which varies."""
    tensors = (
        VaryingTensor(tuple(map(Extent, spec.shape)), tuple(map(Extent, spec.stride))) for spec in specs
    )
    return VaryingSizes((), tuple(tensors))


def _extent(values: tuple[int, ...], symbols: dict[tuple[int, ...], int]) -> Extent:
    if len(set(values)) == 1:
        return Extent(values[0])
    return Extent(1, (symbols.setdefault(values, len(symbols)),))


def strides_in(
    seen: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[Extent]
) -> tuple[Extent, ...] | None:
    """Return the strides of a tensor as products of its extents.

    Args:
        seen: its shape and stride at one size or more.
        shape: its extents.

    Returns:
        None if they follow no such rule.
    """
    dims = sorted(range(len(shape)), key=lambda dim: (seen[-1][1][dim], seen[-1][0][dim] != 1))
    known: dict[int, Extent] = {}
    for dim in dims:
        strides = [stride[dim] for _, stride in seen]
        inner = (
            known[other].times(shape[other])
            for other in reversed(list(known))
            if all(sizes[other] * stride[other] == stride[dim] for sizes, stride in seen)
        )
        extent = next(inner, None)
        if extent is None or math.prod(strides) == 0:
            if len(set(strides)) != 1:
                return None
            extent = Extent(strides[0])
        known[dim] = extent
    return tuple(known[dim] for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class TangentsSeen:
    """The gradients that come back to a step's outputs at some sizes.

    Attributes:
        sizes: of the inputs.
        layouts: shape and strides of each.
        has_views: True if other outputs are views of these, of inputs or of weights.
    """

    sizes: tuple[int, ...]
    layouts: tuple[tuple[Sequence[int], Sequence[int]], ...]
    has_views: bool

    def extents(self, hints: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[list[Extent]] | None:
        """Return the shapes of the outputs as multiples of single sizes.

        Args:
            hints: other sizes.
            shapes: of the outputs at these.

        Returns:
            None if some extents follow no such rule.
        """
        results: list[list[Extent]] = []
        for (old, _), new in zip(self.layouts, shapes, strict=True):
            extents = [self._extent(before, now, hints) for before, now in zip(old, new, strict=True)]
            known = [extent for extent in extents if extent is not None]
            if len(known) < len(extents):
                return None
            results.append(known)
        return results

    def _extent(self, before: int, now: int, hints: Sequence[int]) -> Extent | None:
        if before == now:
            return Extent(now)
        for index, (size, hint) in enumerate(zip(self.sizes, hints, strict=True)):
            if size != hint and before % size == now % hint == 0 and before // size == now // hint:
                return Extent(now // hint, (index,))
        return None


def layout_in_extents(shape: Sequence[int], stride: Sequence[int]) -> tuple[Extent, ...]:
    """Return the strides of a tensor as products of its own extents, each a size by its dimension."""
    own = [Extent(1, (dim,)) if extent >= LEAST else Extent(extent) for dim, extent in enumerate(shape)]
    return strides_in([(shape, stride)], own) or tuple(map(Extent, stride))
