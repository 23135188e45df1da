"""ResNet and VGG for CIFAR-10, 32×32 pixels in ten classes, as in the posts that SmartPool §VI names.

torch.ch's VGG (S. Zagoruyko, "92.45% on CIFAR-10 in Torch", 2015): convolutions with batch normalisation,
dropout between most, and a classifier of 512 units. Its ResNets (S. Gross, M. Wilber, "Training and
investigating Residual Nets", 2016) with a 3×3 stem that keeps the resolution, and the depths of Table I.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.models import import_torchvision

CLASSES = 10
PIXELS = 32
VGG_STAGES = {
    "vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4),
}  # fmt: skip
"""Convolutions between two poolings."""

VGG_FILTERS = (64, 128, 256, 512, 512)


def _resnet(name: str) -> nn.Module:
    model = import_torchvision().models.get_model(name, weights=None, num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _vgg(name: str) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for stage, (count, filters) in enumerate(zip(VGG_STAGES[name], VGG_FILTERS, strict=True)):
        for index in range(count):
            layers += [
                nn.Conv2d(channels, filters, 3, padding=1),
                nn.BatchNorm2d(filters),
                nn.ReLU(inplace=True),
            ]
            if index < count - 1:
                layers.append(nn.Dropout(0.4 if stage else 0.3))
            channels = filters
        layers.append(nn.MaxPool2d(2))
    classifier = [
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(inplace=True),
        nn.Dropout(0.5), nn.Linear(512, CLASSES),
    ]  # fmt: skip
    return nn.Sequential(*layers, *classifier)


def _factory(name: str):
    def make(batch_size: int = 1):
        model = _resnet(name) if name.startswith("resnet") else _vgg(name)
        images = torch.randn(batch_size, 3, PIXELS, PIXELS)
        return model, (images, torch.randint(CLASSES, (batch_size,))), F.cross_entropy

    return make


resnet18, resnet34, resnet50, resnet101 = map(_factory, ("resnet18", "resnet34", "resnet50", "resnet101"))
vgg11, vgg13, vgg16, vgg19 = map(_factory, ("vgg11", "vgg13", "vgg16", "vgg19"))
