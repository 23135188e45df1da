"""Fake forms of our own operators promise what the kernels make."""

import pytest
import torch

from olla_fx import draws, operators, torch_compat
from tests.olla_fx.comparisons import assert_same

aten = torch.ops.aten


def stack_of_transposed(*shape):
    return torch.randn(*shape).transpose(-1, -2)


OFFSETS = torch.tensor([2, 2, 8], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("left", "right", "offsets"),
    [
        (torch.randn(8, 16), torch.randn(3, 16, 24), OFFSETS),
        (torch.randn(8, 16), stack_of_transposed(3, 6, 16), OFFSETS),
        (torch.randn(3, 7, 16), stack_of_transposed(8, 16), OFFSETS),
        (stack_of_transposed(8, 16), torch.randn(8, 24), OFFSETS),
        (torch.randn(3, 4, 8), torch.randn(3, 8, 16), None),
        (torch.randn(3, 4, 8), stack_of_transposed(3, 5, 8), None),
    ],
    ids=["rows", "rows with gaps", "columns", "inner", "stacks", "stacks with gaps"],
)
def test_grouped_products(left, right, offsets, dtype):
    left, right = left.to(dtype), right.to(dtype)
    real = aten._grouped_mm.default(left, right, offs=offsets)
    own = operators.grouped_mm(left, right, offs=offsets)
    torch.testing.assert_close(own, real, rtol=0, atol=0)
    with torch_compat.new_fake_mode() as mode:
        fake = operators.grouped_mm(
            *(tensor if tensor is None else mode.from_tensor(tensor) for tensor in (left, right, offsets))
        )
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "like",
    [
        torch.randn(6, 8, 10),
        torch.randn(6, 8, 10).permute(2, 0, 1),
        torch.randn(6, 8, 10)[:, :5, ::2],
        torch.randn(8, 1).expand(6, 8, 10),
    ],
    ids=["dense", "permuted", "slice", "expanded"],
)
def test_dropout(like, dtype, p):
    x = like.to(dtype)
    if x.is_contiguous():
        x.view(-1)[:3] = torch.tensor([torch.inf, torch.nan, -0.0])
    torch.manual_seed(0)
    real = aten.native_dropout.default(x, p, True)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    mask = draws.dropout_mask(x.shape, real[1].stride(), p, x.device)
    own = operators.dropout_backward(x, mask, 1.0 / (1.0 - p) if p < 1 else 0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(real, (own, mask), "dropout")
    backward = aten.native_dropout_backward.default(x, real[1], 1.25)
    assert_same(backward, operators.dropout_backward(x, real[1], 1.25), "backward")


@pytest.mark.parametrize(
    "gradient",
    [
        torch.randn(2, 6, 8),
        torch.randn(2, 8, 6).transpose(1, 2),
        torch.randn(2, 12, 8)[:, ::2],
        torch.randn(8).expand(2, 6, 8),
        torch.ones(()).expand(2, 6, 8),
    ],
    ids=["dense", "transposed", "slice", "rows", "of a sum"],
)
@pytest.mark.parametrize("mask", [torch.rand(2, 6, 8) > 0.5, torch.rand(6, 2, 8).transpose(0, 1) > 0.5])
def test_gradient_of_dropout(gradient, mask):
    real = aten.native_dropout_backward.default(gradient, mask, 1.25)
    with torch_compat.new_fake_mode() as mode:
        fake = operators.native_dropout_backward(mode.from_tensor(gradient), mode.from_tensor(mask), 1.25)
    assert_same(real, operators.native_dropout_backward(gradient, mask, 1.25), "gradient")
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
