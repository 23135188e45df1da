"""Regions of memory: disjoint ones have no byte in common."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olla_fx.passes.regions import Region


def elements(region: Region) -> set[int]:
    steps = [range(0, size * stride, stride) if stride else [0] for size, stride in region.extents]
    return {region.offset_bytes + sum(offsets) for offsets in itertools.product(*steps)}


REGIONS = st.builds(
    lambda offset, extents: Region(1, offset, ((2, 1), *extents)),
    st.integers(0, 24).map(lambda number: 2 * number),
    st.lists(st.tuples(st.integers(2, 4), st.sampled_from([0, 2, 4, 6, 8, 12, 18, 24])), max_size=3).map(
        tuple
    ),
)


@given(REGIONS, REGIONS)
def test_disjoint_regions_have_no_byte_in_common(region, other):
    if not region.overlaps(other):
        assert not elements(region) & elements(other)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_chunks_are_disjoint(dim):
    chunks = [Region.of(chunk) for chunk in torch.empty(6, 6, 6).chunk(3, dim)]
    for region, other in itertools.product(chunks, chunks):
        assert region.overlaps(other) == (region is other)
