"""Traces operators whose results are as long as their data says with the length that the data has.

``nonzero``, ``x[mask]``, ``masked_select`` and ``repeat_interleave`` are such operators. If the mask follows
from constants and inputs, its ones are counted, which makes the count a question about the inputs, and the
operator is replaced by one of that size: ``nonzero`` by :data:`olla_fx.operators.nonzero_sized`, indexing
with a mask by indexing with the numbers that it stands for. That is what eager's kernels do themselves, so
the bits are theirs. Of other masks nobody knows the count before a call; tracing then refuses the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from olla_fx import operators

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Tracer(Protocol):
    """What traces operators, and knows numbers that follow from the inputs."""

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace an operator."""

    def number_of(self, operator: Any, tensor: torch.Tensor, *arguments: Any) -> Any:
        """Return the number that an operator makes of a tensor, or its symbol; None if nobody knows it."""


def of_known_size(operator: Any, arguments: Arguments, tracer: Tracer) -> tuple[Any, Arguments]:
    """Return what to trace in an operator's place; the same if its size is no question.

    Args:
        operator: of ATen.
        arguments: its arguments and keyword arguments.
        tracer: traces what is needed before.
    """
    args, kwargs = arguments
    if operator is aten.nonzero.default:
        count = tracer.number_of(aten.count_nonzero.default, args[0])
        if count is not None:
            return operators.nonzero_sized, ((args[0], count), {})
    elif operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        indices = _expanded(args[0], args[1], tracer)
        if indices is not None:
            return operator, ((args[0], indices), {})
    elif operator is aten.masked_select.default:
        values, mask = torch.broadcast_tensors(args[0], args[1])  # type: ignore[no-untyped-call]
        positions = _positions(mask, args[1], tracer)
        if positions is not None:
            return aten.index.Tensor, ((values, positions), {})
    elif operator is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None and len(args) == 1:
        count = tracer.number_of(aten.sum.default, args[0])
        if count is not None:
            return operator, (args, {"output_size": count})
    return operator, arguments


def _expanded(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], tracer: Tracer
) -> list[torch.Tensor | None] | None:
    """Return indices with the positions of ones in the place of masks; None if no mask's are known."""
    if all(index is None or index.dtype not in _MASKS for index in indices):
        return None
    results: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            results.append(index)
            continue
        first = len(results)
        masked = tensor.shape[first : first + index.dim()]
        if masked != index.shape:
            raise IndexError(f"a mask of shape {list(index.shape)} is laid over dimensions {list(masked)}")
        positions = _positions(index, index, tracer)
        if positions is None:
            return None
        results += positions
    return results


def _positions(mask: torch.Tensor, asked: torch.Tensor, tracer: Tracer) -> list[torch.Tensor] | None:
    """Return for each dimension of a mask where its ones are; None if nobody knows how many.

    Args:
        mask: what to look at.
        asked: the mask itself, or what it was expanded from.
        tracer: traces operators.
    """
    count = tracer.number_of(aten.count_nonzero.default, asked)
    if count is None or not mask.dim():
        return None
    count *= mask.numel() // max(asked.numel(), 1)
    positions = tracer.run(operators.nonzero_sized, (mask, count), {})
    return [tracer.run(aten.select.int, (positions, 1, dim), {}) for dim in range(mask.dim())]
