"""oneDNN's LSTM under names of our own: a graph's plain call of ATen's operators would do less than eager.

The forward keeps what its backward needs (its workspace) only while gradients are enabled, which they are
not when a planned step runs. The backward returns one tensor as the gradients of both biases, though its
fake form makes two: here it is one result. Both run the operators of ATen, so that the bits are eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from olla_fx import torch_compat

aten = torch.ops.aten
_library = torch.library.Library("olla_fx", "DEF")  # type: ignore[no-untyped-call]
_FIRST_BIAS, _SECOND_BIAS = 3, 4


def _define(
    name: str, original: Any, run: Callable[..., Any], fake: Callable[..., Any], results: str | None = None
) -> Any:
    """Define an operator with the arguments of ``original``, and its results unless others are given."""
    arguments, returned = str(original._schema).split(" -> ")
    _library.define(f"{name}{arguments[arguments.index('(') :]} -> {results or returned}")  # type: ignore[no-untyped-call]
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


def with_both_bias_gradients(gradients: Any) -> tuple[torch.Tensor, ...]:
    """The results of ``mkldnn_rnn_layer_backward`` from those of :data:`lstm_layer_backward`."""
    bias = gradients[_FIRST_BIAS]
    return *gradients[:_SECOND_BIAS], bias.clone(), *gradients[_SECOND_BIAS:]
