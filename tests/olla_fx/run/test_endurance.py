"""A thousand steps: nothing grows, nothing is planned again."""

import gc
import resource

import pytest
import torch
import torch.nn.functional as F

import olla_fx
from olla_fx.models.vision import import_torchvision


def resident_bytes():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["whole", "own"])
def test_a_thousand_steps_of_resnet18(loop):
    model = import_torchvision().models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    if loop == "whole":
        step = olla_fx.optimize(model, (x, y), loss_fn=F.cross_entropy, optimizer=optimizer, fallback="raise")
    else:
        step = olla_fx.optimize(model, x, fallback="raise")
    sizes = []
    for index in range(1000):
        if loop == "whole":
            step(x, y)
        else:
            optimizer.zero_grad()
            F.cross_entropy(step(x), y).backward()
            optimizer.step()
        if index == 0:
            settled = step.graph_module
        else:
            assert step.stats.counts.served > 0
            assert step.stats.counts.outside == 0
            assert step.stats.counts.outputs == 1
        if index % 100 == 99:
            gc.collect()
            sizes.append(resident_bytes())
    assert step.stats.replans == 0
    assert step.graph_module is settled  # a step that is recorded again gets a new plan
    assert step.stats.binding == "buffer"
    assert max(sizes[2:]) - sizes[1] < 4 << 20, sizes
