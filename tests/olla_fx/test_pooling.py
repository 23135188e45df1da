"""Max-pooling with packed places: the bits of ATen's, and as few bits as told."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from olla_fx import pooling

aten = torch.ops.aten
INFINITE = float("inf")
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), INFINITE, *[-INFINITE] * 6])
KINDS = {
    2: (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    3: (aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default),
}
ARGUMENTS = [
    ([2],),
    ([3], [2], [1]),
    ([3], [1], [1], [1], True),
    ([3], [2], [0], [2], True),
    ([1, 2], [3, 1], [0, 1]),
    ([3], [3], [1]),
    ([4], [3], [2], [1], True),
    ([5], [1], [2]),
]
VALUES = {
    "random": torch.randn,
    "special": lambda shape: SPECIAL[torch.randint(len(SPECIAL), shape)],
    "least": lambda shape: torch.full(shape, -INFINITE),
}


def same(one, other):
    """Compare layout and bits."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return one.stride() == other.stride() and torch.equal(one.view(kind), other.view(kind))


def check(x, arguments, order=torch.contiguous_format):
    """Compare a pooling of each width with ATen's, forward and backward; return the least width."""
    dimensions = 2 if x.dim() < 5 else 3
    forward, backward = KINDS[dimensions]
    x = x.contiguous(memory_format=order)
    maxima, indices = forward(x, *arguments)
    gradient = torch.randn(maxima.shape).to(x.dtype)
    complete = pooling.complete(arguments)
    of_backward = complete[0], complete[1] or complete[0], *complete[2:]
    expected = backward(gradient, x, *of_backward, indices)
    least = pooling.bits_of(arguments, dimensions)
    for bits in pooling.BITS:
        if bits >= least:
            how = bits, order is torch.channels_last
            own, places = pooling.PACKED[forward](x, *complete, *how)
            assert same(own, maxima)
            assert places.numel() <= maxima.numel()
            shape = x.shape, x.stride()
            packed = pooling.PACKED_BACKWARD[backward]
            assert same(packed(gradient, *shape, *of_backward, places, *how), expected)
    return least


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_bits(arguments, values, dtype):
    torch.manual_seed(0)
    for shape in ((2, 3, 9, 9), (3, 7, 8), (2, 3, 7, 6, 5)):
        if len(shape) < 5 or len(arguments[0]) == 1:
            check(VALUES[values](shape).to(dtype), arguments)
    check(VALUES[values]((2, 3, 9, 8)).to(dtype), arguments, torch.channels_last)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("arguments", [([2],), ([3], [2], [1]), ([2, 3], [1, 2])], ids=str)
def test_large(arguments, order):
    torch.manual_seed(0)
    for shape in ((21, 16, 37, 41), (1, 67, 61, 59)):
        check(torch.randn(shape), arguments, order)


def test_widths():
    assert check(torch.randn(2, 3, 8, 8), ([2],)) == 2
    assert check(torch.randn(2, 3, 9, 9), ([3],)) == 4
    assert check(torch.randn(2, 3, 9, 9), ([5],)) == 8
    assert pooling.bits_of(([16, 17],), 2) is None


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_fake_results_are_those_that_are_computed(order):
    forward = KINDS[2][0]
    x = torch.randn(40, 8, 67, 65).contiguous(memory_format=order)
    for arguments in ARGUMENTS:
        how = *pooling.complete(arguments), 8, order is torch.channels_last
        with FakeTensorMode() as mode:
            fakes = pooling.PACKED[forward](mode.from_tensor(x), *how)
        for real, fake in zip(pooling.PACKED[forward](x, *how), fakes, strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
