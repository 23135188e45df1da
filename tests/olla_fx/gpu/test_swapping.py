"""Steps on a GPU whose arrays wait in page-locked memory, bit for bit those of eager."""

import pytest
import torch
from torch import nn

from tests.olla_fx.gpu.test_steps import MOMENTUM, images
from tests.olla_fx.harness import OwnLoop, WholeStep
from tests.olla_fx.helpers import SmallNet
from tests.olla_fx.transfers import at_once, far_ones, swapping


def deep(device, width=1024):
    layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 5)).to(device)


def vectors(device, count, width=1024):
    generator = torch.Generator().manual_seed(8)
    return [
        (
            torch.randn(256, width, generator=generator).to(device),
            torch.randint(5, (256,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("choose", [at_once, far_ones])
def test_whole_steps_equal_eager(device, choose):
    batches = vectors(device, 6)
    pair = WholeStep(deep(device), MOMENTUM, batches[0], swap=swapping(choose=choose)).run(batches)
    assert pair.step.plan.swapped.arrays


@pytest.mark.parametrize("choose", [at_once, far_ones])
def test_loops_of_ones_own_equal_eager(device, choose):
    batches = images(device, 6)
    pair = OwnLoop(SmallNet().to(device), batches[0][0], swap=swapping(choose=choose)).run(batches)
    assert pair.step.plan.swapped.arrays


def test_backward_twice(device):
    batches = vectors(device, 4)
    pair = OwnLoop(deep(device), batches[0][0], swap=swapping()).run(batches)
    pair.zero_grad()
    for loss in pair.losses(batches[0]):
        loss.backward(retain_graph=True)
        loss.backward()
    pair.compare_gradients()
