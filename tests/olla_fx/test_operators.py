"""Fake forms of our own operators promise what the kernels make."""

import pytest
import torch

from olla_fx import operators, torch_compat

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
