"""Decomposes composite operators by their C++ code while tracing, as eager runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from olla_fx.torch_compat.patches import PATCHING
from olla_fx.torch_compat.state import real_tensors

# Python kernels that tracing needs: functionalisation cannot see the running statistics that the C++
# batch norm writes, and the other C++ forms ask for values of their data.
_NEEDED_PYTHON_KERNELS = frozenset(
    {
        "aten::native_batch_norm",
        "aten::one_hot",
        "aten::tensor_split",
        "aten::unsafe_chunk",
        "aten::broadcast_tensors",
        "aten::empty",
    }
)

_COMPOSITE_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)


@contextlib.contextmanager
def composite_operators_as_in_eager() -> Iterator[None]:
    """Decompose composite operators by their C++ code, as eager runs them.

    torch registers Python forms of LSTM, interpolation, dropout and others for tracing, which compute in
    another order, or draw other random numbers. Dropout and cuDNN's batch norm get forms of our own.
    """
    with PATCHING:
        removed: list[tuple[Any, Any, Any]] = []
        for operator in _operators_with_python_kernels():
            for key in _COMPOSITE_KEYS:
                if key in operator.py_kernels:
                    removed.append((operator, key, operator.py_kernels.pop(key)))
                    operator._dispatch_cache.clear()
        replacements: list[tuple[Any, Any]] = [
            (torch.ops.aten.dropout.default, _dropout),
            (torch.ops.aten.cudnn_batch_norm.default, _cudnn_batch_norm),
        ]
        for operator, kernel in replacements:
            operator.py_kernels.update(dict.fromkeys(_COMPOSITE_KEYS, kernel))
            operator._dispatch_cache.clear()
        try:
            yield
        finally:
            for operator, _ in replacements:
                for key in _COMPOSITE_KEYS:
                    del operator.py_kernels[key]
                operator._dispatch_cache.clear()
            for operator, key, kernel in removed:
                operator.py_kernels[key] = kernel
                operator._dispatch_cache.clear()


def _operators_with_python_kernels() -> list[Any]:
    packets = [
        packet for packet in vars(torch.ops.aten).values() if isinstance(packet, torch._ops.OpOverloadPacket)
    ]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]  # type: ignore[no-untyped-call]
    return [
        operator
        for operator in operators
        if operator.py_kernels and operator._schema.name not in _NEEDED_PYTHON_KERNELS
    ]


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Compute dropout with eager's results, with a mask of bytes if that gives the same bits.

    On CUDA that is eager's own kernel, ``native_dropout``. On the CPU, eager multiplies by a mask of the
    input's own type, divided by ``1 - p``; ``native_dropout`` keeps one byte an element and multiplies by
    ``1 / (1 - p)``: forward and backward equal eager's for float32 and float64 if both round to the same
    number, but not for shorter types, whose scaled mask rounds.
    """
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    exact = tensor.dtype in (torch.float32, torch.float64) and _scales_are_equal(p, tensor.dtype)
    if p < 1 and (tensor.is_cuda or exact):
        dropped: torch.Tensor = torch.ops.aten.native_dropout(tensor, p, train)[0]
        return dropped
    if p == 1:
        return tensor.mul(torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_(1 - p)


def _cudnn_batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Run cuDNN's batch norm; in training by an operator whose schema says that it writes the statistics.

    That operator's kernel chooses cuDNN if eager does. Its counterpart for inference has a kernel for the CPU
    alone; so cuDNN's own, which writes nothing in inference, is differentiated as in eager.
    """
    if not training:
        operator: Any = torch.ops.aten.cudnn_batch_norm.default
        key = torch._C.DispatchKey.Autograd
        inferred: tuple[torch.Tensor, ...] = operator._op_dk(
            key, tensor, weight, bias, running_mean, running_var, training, momentum, eps
        )
        return inferred
    if running_mean is None or running_var is None:
        unused = weight.new_zeros(tensor.shape[1]), weight.new_zeros(tensor.shape[1])
        running_mean, running_var = unused
    results: tuple[torch.Tensor, ...] = torch.ops.aten._batch_norm_with_update(
        tensor, weight, bias, running_mean, running_var, momentum, eps
    )
    return results


def _scales_are_equal(p: float, dtype: torch.dtype) -> bool:
    with real_tensors():
        unit = torch.ones((), dtype=dtype)
        return p < 1 and bool(unit.div(1 - p) == unit.mul(1 / (1 - p)))
