"""Gives fake results the strides that kernels give real ones.

PyTorch's fake forms of some operators are decompositions, whose results lie in memory as those of other
kernels would: the gradient of a layer norm as the incoming gradient does, where the kernel's is contiguous,
say. What is traced behind them then leaves out a copy that eager makes, or makes one that it does not, and
what is planned there computes on wrong strides. The rules are what ATen's kernels do; the tests compare them,
and all other operators of many layers, with real results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

aten = torch.ops.aten

_Rule: TypeAlias = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
"""Returns, for a result and the operator's arguments, a tensor that lies in memory as the result should."""


def _contiguous(result: torch.Tensor, _: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty(result.shape, dtype=result.dtype, device=result.device)


def _like_first(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty_like(args[0], dtype=result.dtype)


def _suggested_by(position: int) -> _Rule:
    """Return the rule of results in the memory format that an argument suggests."""

    def rule(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        return _contiguous(result, args).contiguous(memory_format=suggest_memory_format(args[position]))

    return rule


def _by_element(*positions: int) -> _Rule:
    """Return the rule of results that a kernel computes element by element, of arguments in some sequence."""

    def rule(_: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        one, other = (args[position] for position in positions)
        return torch.add(one, other)

    return rule


def _leaky(result: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    # The gradient of a random slope; without training, of one that is fixed.
    return _by_element(2, 0)(result, args) if args[5] else _by_element(1, 0)(result, args)


_RULES: dict[Any, _Rule] = {
    aten._log_softmax_backward_data.default: _contiguous,
    aten._prelu_kernel_backward.default: _by_element(1, 0),
    aten.elu_backward.default: _by_element(0, 5),
    aten.glu_backward.default: _contiguous,
    aten.hardsigmoid_backward.default: _by_element(0, 1),
    aten.hardswish_backward.default: _by_element(0, 1),
    aten.hardtanh_backward.default: _by_element(0, 1),
    aten.huber_loss_backward.default: _contiguous,
    aten.leaky_relu_backward.default: _by_element(1, 0),
    aten.log_sigmoid_backward.default: _like_first,
    aten.mse_loss_backward.default: _contiguous,
    aten.native_layer_norm_backward.default: _contiguous,
    aten.rrelu_with_noise.default: _contiguous,
    aten.rrelu_with_noise_backward.default: _leaky,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.softplus_backward.default: _by_element(0, 1),
    aten.threshold_backward.default: _by_element(1, 0),
}
"""Operators whose kernels do the same on all devices."""

_RULES_ON_CPU: dict[Any, _Rule] = {
    aten._batch_norm_with_update.default: _suggested_by(0),
    aten._native_batch_norm_legit.default: _suggested_by(0),
    aten._native_batch_norm_legit.no_stats: _suggested_by(0),
    aten._native_batch_norm_legit_no_training.default: _suggested_by(0),
    aten.channel_shuffle.default: _suggested_by(0),
    aten.log_sigmoid_forward.default: _contiguous,
    aten.native_batch_norm.default: _suggested_by(0),
    aten.native_batch_norm_backward.default: _suggested_by(1),
    aten.reflection_pad2d_backward.default: _suggested_by(1),
    aten.replication_pad2d_backward.default: _suggested_by(1),
    aten.roll.default: _suggested_by(0),
}


class TrueLayouts(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode in which results lie in memory as real ones do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors, and correct the strides of what it makes."""
        results = super().__torch_dispatch__(func, types, args, kwargs)
        rule = _RULES.get(func) or _RULES_ON_CPU.get(func)
        if rule is None:
            return results
        # Of contiguous arguments all make contiguous results.
        if all(argument.is_contiguous() for argument in args if isinstance(argument, torch.Tensor)):
            return results
        if func in _RULES_ON_CPU and args[0].device.type != "cpu":
            return results
        shape = _shape_of_first(results)

        def corrected(result: Any) -> Any:
            # What an operator makes beside (gradients of weights, say) has another shape, and is right.
            if not isinstance(result, torch.Tensor) or result.shape != shape:
                return result
            with self:
                return rule(result, args).to(result.dtype)

        return pytree.tree_map(corrected, results)


def _shape_of_first(results: Any) -> Any:
    return next((leaf.shape for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)), None)
