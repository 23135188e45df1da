"""Element types and memory formats train as in eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.harness import WholeStep
from tests.olla_fx.helpers import ADAMW, MOMENTUM, SmallNet, Written, images, mlp, vectors


def test_channels_last_and_mixed_types():
    class Mixed(SmallNet):
        def forward(self, x):
            return super().forward(x).to(torch.bfloat16).float()

    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in images(20)]
    model = Mixed().to(memory_format=torch.channels_last)
    WholeStep(model, MOMENTUM, batches[0]).run(batches)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
def test_element_types(dtype, make):
    batches = [(x.to(dtype), y) for x, y in vectors(3)]
    WholeStep(mlp().to(dtype), make, batches[0]).run(batches)


def test_gradients_in_another_layout_than_activations():
    """The gradient of a mean comes in rows, activations do not: fake tensors err about what both give."""
    form = torch.channels_last_3d
    layers = (
        nn.Conv3d(2, 4, 3),
        nn.BatchNorm3d(4),
        nn.ELU(inplace=True),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
    )
    batches = [(torch.randn(2, 2, 6, 6, 6).to(memory_format=form), torch.randint(4, (2,))) for _ in range(3)]
    WholeStep(nn.Sequential(*layers).to(memory_format=form), MOMENTUM, batches[0]).run(batches)


class NormalizedChannels(nn.Module):
    """A convolution over words, dropped out and normalized over its channels, as SqueezeBERT has them."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(32, 32, 1, groups=4), nn.LayerNorm(32)

    def forward(self, x):
        return self.norm((F.dropout(self.conv(x), 0.1) + x).permute(0, 2, 1)).mean(1)


def test_gradients_of_dropout_in_another_layout_than_its_mask():
    """The kernel gives a gradient in the layout of the incoming one, of which a bias' is the sum."""
    batches = [(torch.randn(2, 32, 16), torch.randint(32, (2,))) for _ in range(3)]
    WholeStep(NormalizedChannels(), MOMENTUM, batches[0]).run(batches)


def bernoulli_in_place(model, x):
    """Eager draws in the order of memory, in a slice and in the mask of ``Dropout(0.3)``, too."""
    hidden = F.dropout(model.body(x), 0.3)
    mask = torch.zeros_like(hidden)
    mask[:, :, 1:].bernoulli_(0.5)
    return F.alpha_dropout(hidden * mask, 0.2, training=True).mean((2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_in_the_order_of_memory(dtype):
    form = torch.channels_last
    batches = [(x.to(dtype, memory_format=form), target) for x, target in images(3)]
    body = nn.Conv2d(3, 5, 3).to(dtype, memory_format=form)
    WholeStep(Written(bernoulli_in_place, body=body), MOMENTUM, batches[0]).run(batches)


@pytest.mark.parametrize("make", [MOMENTUM, ADAMW])
@pytest.mark.parametrize("inputs_too", [True, False])
def test_channels_last(make, inputs_too):
    form = torch.channels_last if inputs_too else torch.contiguous_format
    batches = [(x.to(memory_format=form), y) for x, y in images(3)]
    WholeStep(SmallNet().to(memory_format=torch.channels_last), make, batches[0]).run(batches)
