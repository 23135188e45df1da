"""Whole architectures train as in eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.models import build_model, import_torchvision
from tests.olla_fx.harness import WholeStep, check_inference
from tests.olla_fx.helpers import ADAMW, MOMENTUM, images, pairs, sgd


class UNet(nn.Module):
    def __init__(self, mode=None):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.narrow = nn.Conv2d(8, 4, 1)
        self.out = nn.Conv2d(8, 3, 1)
        self.mode = mode

    def forward(self, x):
        shallow = F.relu(self.down(x), inplace=True)
        deep = self.norm(F.relu(self.deep(F.max_pool2d(shallow, 2)), inplace=True))
        if self.mode is None:
            up = self.up(deep)
        else:
            up = F.interpolate(self.narrow(deep), scale_factor=2.0, mode=self.mode)
        return self.out(torch.cat([shallow, up], 1))


@pytest.mark.parametrize("mode", [None, "nearest", "bilinear", "bicubic"])
def test_u_net(mode):
    batches = pairs((2, 3, 8, 8), (2, 3, 8, 8))
    WholeStep(UNet(mode), ADAMW, batches[0], F.mse_loss).run(batches)


@pytest.mark.parametrize("make", [sgd, ADAMW])
def test_resnet18(make):
    model = import_torchvision().models.resnet18(num_classes=5)
    WholeStep(model, make, images(1, 2, 32)[0]).run(images(3, 2, 32))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mobilenet_v2", 32),
        ("squeezenet1_1", 64),
        pytest.param("shufflenet_v2_x0_5", 64, marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", 32, marks=pytest.mark.slow),
    ],
)
def test_torchvision_models(name, size):
    model = import_torchvision().models.get_model(name, num_classes=5)
    WholeStep(model, MOMENTUM, images(1, 2, size)[0]).run(images(3, 2, size))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t", "densenet121", "mnasnet0_5", "regnet_y_400mf"])
def test_larger_torchvision_models(name):
    model = import_torchvision().models.get_model(name, num_classes=5)
    WholeStep(model, MOMENTUM, images(1, 2, 64)[0]).run(images(3, 2, 64))


def test_vision_transformer():
    transformer = import_torchvision().models.VisionTransformer(
        image_size=16,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout=0.1,
        num_classes=5,
    )
    WholeStep(transformer, ADAMW, images(1, 2, 16)[0]).run(images(3, 2, 16))


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_transformers_models(architecture):
    case = build_model(f"transformers:{architecture}", batch_size=2, tokens=5)
    ids, target = case.inputs
    batches = [
        (torch.randint(2, 1000, ids.shape), torch.randint(int(target.max()) + 1, target.shape))
        for _ in range(3)
    ]
    WholeStep(case.model, ADAMW, case.inputs, case.loss_fn).run(batches)


def test_transformers_inference_returns_its_own_structure():
    case = build_model("transformers:bert", batch_size=2, tokens=5, train=False)
    step = check_inference(case.model, [case.inputs, case.inputs, case.inputs], 1)
    assert type(step(*case.inputs)) is type(case.model(*case.inputs))
