"""Inception-ResNet-v2, after Szegedy, Ioffe, Vanhoucke, Alemi: "Inception-v4, Inception-ResNet" (2017).

Figures 3 (stem), 16 to 19 (blocks and reductions) and Table 1 (filters of reduction A) of that paper, with
images of 299×299. Where its figures let a block's last convolution have other filters than the block's input
(1154 and 2048, to which nothing can be added), the input's are taken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IMAGE_SIZE = 299
CLASSES = 1000


class Conv(nn.Sequential):
    """Convolution without bias, batch normalisation, ReLU."""

    def __init__(
        self, inputs: int, filters: int, size: int | tuple[int, int], stride: int = 1, padding="same"
    ):
        """Make the layers; padding is ``same`` or ``valid``, as in the paper's figures."""
        super().__init__(
            nn.Conv2d(inputs, filters, size, stride, padding, bias=False),
            nn.BatchNorm2d(filters, eps=1e-3),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Several ways from one input, their results side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        """Keep the branches."""
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the branches' outputs."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Residual(nn.Module):
    """An Inception-ResNet block: branches, a linear 1×1 convolution, scaled, added to the input."""

    def __init__(self, filters: int, joined: int, branches: Branches, scale: float) -> None:
        """Make the block; ``joined`` is the number of filters of all branches together."""
        super().__init__()
        self.branches = branches
        self.linear = nn.Conv2d(joined, filters, 1)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the scaled residual to the input."""
        return F.relu(x + self.scale * self.linear(self.branches(x)))


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2)


def _stem() -> nn.Sequential:
    """Build Figure 3."""
    factorised = nn.Sequential(
        Conv(160, 64, 1), Conv(64, 64, (7, 1)), Conv(64, 64, (1, 7)), Conv(64, 96, 3, padding="valid")
    )
    return nn.Sequential(
        Conv(3, 32, 3, stride=2, padding="valid"),
        Conv(32, 32, 3, padding="valid"),
        Conv(32, 64, 3),
        Branches(_pool(), Conv(64, 96, 3, stride=2, padding="valid")),
        Branches(nn.Sequential(Conv(160, 64, 1), Conv(64, 96, 3, padding="valid")), factorised),
        Branches(_pool(), Conv(192, 192, 3, stride=2, padding="valid")),
    )


def _block_a() -> Residual:
    """Build Figure 16."""
    branches = Branches(
        Conv(384, 32, 1),
        nn.Sequential(Conv(384, 32, 1), Conv(32, 32, 3)),
        nn.Sequential(Conv(384, 32, 1), Conv(32, 48, 3), Conv(48, 64, 3)),
    )
    return Residual(384, 128, branches, 0.17)


def _block_b() -> Residual:
    """Build Figure 17."""
    branches = Branches(
        Conv(1152, 192, 1),
        nn.Sequential(Conv(1152, 128, 1), Conv(128, 160, (1, 7)), Conv(160, 192, (7, 1))),
    )
    return Residual(1152, 384, branches, 0.1)


def _block_c() -> Residual:
    """Build Figure 19."""
    branches = Branches(
        Conv(2144, 192, 1),
        nn.Sequential(Conv(2144, 192, 1), Conv(192, 224, (1, 3)), Conv(224, 256, (3, 1))),
    )
    return Residual(2144, 448, branches, 0.2)


def _reduction_a() -> Branches:
    """Build Figure 7 with the filters of Table 1: k 256, l 256, m 384, n 384."""
    return Branches(
        _pool(),
        Conv(384, 384, 3, stride=2, padding="valid"),
        nn.Sequential(Conv(384, 256, 1), Conv(256, 256, 3), Conv(256, 384, 3, stride=2, padding="valid")),
    )


def _reduction_b() -> Branches:
    """Build Figure 18."""
    return Branches(
        _pool(),
        nn.Sequential(Conv(1152, 256, 1), Conv(256, 384, 3, stride=2, padding="valid")),
        nn.Sequential(Conv(1152, 256, 1), Conv(256, 288, 3, stride=2, padding="valid")),
        nn.Sequential(Conv(1152, 256, 1), Conv(256, 288, 3), Conv(288, 320, 3, stride=2, padding="valid")),
    )


def inception_resnet_v2(batch_size: int = 1):
    """Return model, example and loss."""
    model = nn.Sequential(
        _stem(),
        *(_block_a() for _ in range(5)),
        _reduction_a(),
        *(_block_b() for _ in range(10)),
        _reduction_b(),
        *(_block_c() for _ in range(5)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2144, CLASSES),
    )
    images = torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    return model, (images, torch.randint(CLASSES, (batch_size,))), F.cross_entropy
