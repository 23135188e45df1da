"""The places of a tensor's elements, and if two may share one, against a look at all of them."""

import itertools

import torch

from olla_fx.capture import TensorSpec


def test_elements_in_one_place():
    for shape in itertools.product(range(4), repeat=2):
        for stride in itertools.product(range(6), repeat=2):
            spec = TensorSpec(shape, stride, torch.float32, torch.device("cpu"))
            places = [
                sum(index * step for index, step in zip(indices, stride, strict=True))
                for indices in itertools.product(*map(range, shape))
            ]
            # Rows that lie between each other's elements count as overlapping, too.
            assert spec.overlaps_itself or len(set(places)) == len(places)
            if sorted(places) == list(range(len(places))):
                assert not spec.overlaps_itself
