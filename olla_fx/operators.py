"""Operators of ATen that eager runs in ways a graph's call of them would not, under names of our own.

* ``lstm_layer``, ``lstm_layer_backward``: oneDNN's LSTM keeps what its backward needs (its workspace) only
  while gradients are enabled, and its backward returns one tensor as the gradients of both biases.
* ``encoder_layer``, ``self_attention``: the fused inference kernels of ``nn.TransformerEncoderLayer`` and
  ``nn.MultiheadAttention`` have no form for fake tensors.

Each runs the operator of ATen itself, so that the bits are eager's.
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


def _fake_encoder_layer(src: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return src.new_empty(src.shape)


def _fake_self_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, embed_dim: int, num_head: int,
    qkv_weight: torch.Tensor, qkv_bias: torch.Tensor, proj_weight: torch.Tensor, proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, length, _ = query.shape
    shape = (batch, length, length) if average_attn_weights else (batch, num_head, length, length)
    return query.new_empty(query.shape), query.new_empty(shape if need_weights else (0,))


lstm_layer = _define("lstm_layer", aten.mkldnn_rnn_layer.default, _run_lstm, aten.mkldnn_rnn_layer.default)
lstm_layer_backward = _define(
    "lstm_layer_backward",
    aten.mkldnn_rnn_layer_backward.default,
    _run_lstm_backward,
    _run_lstm_backward,
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
encoder_layer = _define(
    "encoder_layer",
    aten._transformer_encoder_layer_fwd.default,
    aten._transformer_encoder_layer_fwd.default,
    _fake_encoder_layer,
)
self_attention = _define(
    "self_attention",
    aten._native_multi_head_attention.default,
    aten._native_multi_head_attention.default,
    _fake_self_attention,
)


def with_both_bias_gradients(gradients: Any) -> tuple[torch.Tensor, ...]:
    """The results of ``mkldnn_rnn_layer_backward`` from those of :data:`lstm_layer_backward`."""
    bias = gradients[_FIRST_BIAS]
    return *gradients[:_SECOND_BIAS], bias.clone(), *gradients[_SECOND_BIAS:]
