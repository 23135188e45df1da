"""Masks of bits: the bits of what ATen computes with truth values."""

import math

import pytest
import torch

from olla_fx import draws, masks, operators

aten = torch.ops.aten
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), math.inf, -math.inf, 1e-45, 3e38])
COUNTS = [1, 7, 8, 9, 64, 1000, 100_003]


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def numbers(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    chosen = SPECIAL[torch.randint(len(SPECIAL), (count,), generator=generator)]
    others = torch.randn(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.5, chosen, others)


@pytest.mark.parametrize("threshold", [0.0, 0.5, -1.0])
@pytest.mark.parametrize("count", COUNTS)
def test_comparison(count, threshold):
    x, gradient = numbers(count), numbers(count, 1)
    packed = masks.packed_le(x, threshold)
    assert packed.numel() == -(-count // 8)
    expected = aten.masked_fill(gradient, x <= threshold, 0)
    assert same(masks.packed_fill(gradient, packed), expected)
    assert same(masks.packed_fill_(gradient, packed), expected)
    assert same(gradient, expected)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 0.0, 1.0, 1 / 3])
@pytest.mark.parametrize("count", COUNTS)
def test_dropout(count, rate):
    x, gradient = numbers(count), numbers(count, 1)
    torch.manual_seed(7)
    mask = draws.dropout_mask(x.shape, x.stride(), rate, x.device)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    packed = masks.packed_dropout_mask(x.shape, x.stride(), rate)
    assert torch.equal(torch.get_rng_state(), state)
    scale = 1.0 / (1.0 - rate) if rate < 1 else 0.0
    masked = operators.dropout_backward(gradient, mask, scale)
    assert same(masks.packed_dropout_backward(gradient, packed, scale), masked)
    assert same(masks.packed_dropout_backward_(gradient, packed, scale), masked)
    assert same(gradient, masked)
