"""Inference through the kernels that eager chooses: fused transformer layers, and the form of a matmul."""

from functools import partial

import pytest
import torch
from torch import nn

import olla_fx
from olla_fx.capture import Mode, StepRequest, capture
from olla_fx.errors import CaptureError
from olla_fx.torch_compat.tracing.functional import any_overrides
from tests.olla_fx.comparisons import assert_same
from tests.olla_fx.harness import check_inference

aten = torch.ops.aten
LAYER = partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True)


def targets_of(model, *example):
    captured = capture(StepRequest(model.eval(), example, Mode.INFERENCE))
    return [node.target for node in captured.graph_module.graph.nodes]


class Padded(nn.Module):
    """An encoder over a batch of sequences of several lengths."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(LAYER(), 2, **options)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class SelfAttention(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.options = options

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.attention(x, x, x, **self.options)


def padding() -> torch.Tensor:
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2:] = True
    return mask


@pytest.mark.parametrize(
    "make",
    [
        LAYER,
        partial(LAYER, norm_first=True, activation="gelu"),
        partial(nn.TransformerEncoderLayer, 16, 2, 32),
        partial(nn.TransformerEncoderLayer, 15, 3, 32, batch_first=True),
        lambda: nn.TransformerEncoder(LAYER(), 2),
    ],
    ids=["fused", "fused-norm-first", "sequence-first", "odd-heads", "encoder"],
)
def test_encoder_layers(make):
    model = make()
    width = 15 if isinstance(model, nn.TransformerEncoderLayer) and model.norm1.weight.numel() == 15 else 16
    check_inference(model, [(torch.randn(3, 4, width),) for _ in range(3)], 1)


def test_a_fused_layer_is_one_operator():
    assert aten._transformer_encoder_layer_fwd.default in targets_of(LAYER(), torch.randn(3, 4, 16))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert aten._transformer_encoder_layer_fwd.default not in targets_of(LAYER(), torch.randn(3, 4, 16))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def test_a_step_is_planned_again_when_the_fast_path_is_switched():
    model, x = LAYER().eval(), torch.randn(3, 4, 16)
    step = olla_fx.optimize(model, x, solver="none", fallback="raise")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert_same(model(x), step(x), "without the fast path")
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert step.stats.replans == 1


@pytest.mark.parametrize(
    ("options", "outputs"),
    [({}, 2), ({"need_weights": False}, 1), ({"average_attn_weights": False}, 2)],
    ids=["weights", "no-weights", "weights-of-each-head"],
)
def test_self_attention(options, outputs):
    model = SelfAttention(**options)
    assert aten._native_multi_head_attention.default in targets_of(model, torch.randn(3, 4, 16))
    check_inference(model, [(torch.randn(3, 4, 16),) for _ in range(3)], outputs)


def test_whole_transformer():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    check_inference(model, [(torch.randn(3, 4, 16), torch.randn(3, 5, 16)) for _ in range(3)], 1)


def test_padded_batches():
    check_inference(Padded(enable_nested_tensor=False), [(torch.randn(3, 4, 16), padding())] * 3, 1)


def test_nested_tensors_are_refused():
    with pytest.raises(CaptureError, match="enable_nested_tensor=False"):
        capture(StepRequest(Padded().eval(), (torch.randn(3, 4, 16), padding()), Mode.INFERENCE))


def test_tracing_leaves_torch_as_it_was():
    overrides, tracing = torch.overrides.has_torch_function, torch.nn.modules.activation._is_make_fx_tracing
    targets_of(LAYER(), torch.randn(3, 4, 16))
    assert torch.overrides.has_torch_function is overrides
    assert torch.nn.modules.activation._is_make_fx_tracing is tracing


def test_tensors_with_a_function_of_their_own_are_no_plain_ones():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    plain = (torch.ones(1), nn.Parameter(torch.ones(1)), None, 1)
    assert not any_overrides(plain)
    assert any_overrides((*plain, torch.ones(1).as_subclass(Own)))


@pytest.mark.parametrize("trained", [True, False])
def test_matmul_folds_where_the_weight_wants_a_gradient(trained):
    """Eager asks the weight, even in inference, whether to make one product of a batch or many."""
    model = nn.Linear(8, 6, bias=False).requires_grad_(trained)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.transpose(0, 1)).exp()

    example = torch.randn(5, 3, 8)
    assert (aten.mm.default if trained else aten.bmm.default) in targets_of(Turned(), example)
    check_inference(Turned(), [(torch.randn(5, 3, 8),) for _ in range(3)], 1)
