"""Checksums see every change of a tensor's memory that the tests try."""

import pytest
import torch

from olla_fx.run.checksums import checksum

LAYOUTS = {
    "rows": lambda tensor: tensor,
    "turned": lambda tensor: tensor.t(),
    "with gaps": lambda tensor: tensor[:, ::2],
    "with many gaps": lambda tensor: tensor[:, :1],
    "expanded": lambda tensor: tensor[0].expand(5, tensor.shape[1]),
    "one in": lambda tensor: tensor.view(-1)[1:],
    "numbers": lambda tensor: tensor[2, 1],
    "empty": lambda tensor: tensor[:0],
}
TYPES = torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_counts(layout, dtype):
    whole = torch.randint(2, (7, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor = LAYOUTS[layout](whole)
    before = checksum(tensor)
    assert before.shape == ()
    assert torch.equal(before, checksum(tensor))
    for index in range(tensor.numel()):
        place = tuple(each.item() for each in torch.unravel_index(torch.tensor(index), tensor.shape))
        old = tensor[place].clone()
        tensor.data[place] = 1 - old.real.to(torch.int64)
        assert not torch.equal(before, checksum(tensor)), place
        tensor.data[place] = old
    assert torch.equal(before, checksum(tensor))


@pytest.mark.parametrize(
    "change",
    [torch.neg, torch.zeros_like, lambda tensor: tensor.flip(0), lambda tensor: tensor.roll(1 << 17)],
)
@pytest.mark.parametrize("count", [100, 1 << 18])
def test_changes_of_all_elements(change, count):
    tensor = torch.randn(count + 1, generator=torch.Generator().manual_seed(0))[1:]
    assert not torch.equal(checksum(tensor), checksum(change(tensor)))
