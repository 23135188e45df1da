"""Defines the models of the memory budgets' benchmark that neither torchvision nor transformers has.

The deep residual network and the unrolled LSTM are those of Chen et al., "Training Deep Nets with Sublinear
Memory Cost", §5.2 and §5.3. Each function makes ``(model, example, loss_fn)``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from memory_cases.models import UNet
from torch import nn

from olla_fx.models import CausalLanguageModel, import_torchvision, logits_loss

Case = tuple[nn.Module, tuple[Any, ...], Callable[..., torch.Tensor]]

BLOCKS = 111
"""Blocks a stage of the residual network: three stages of three convolutions each make 999."""


class _PreActivated(nn.Module):
    """A bottleneck of He et al., "Identity Mappings in Deep Residual Networks"."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = [(before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(source) for source, *_ in sizes)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(source, target, kernel, stride=step, padding=kernel // 2, bias=False)
            for source, target, kernel, step in sizes
        )
        changes = before != 4 * width or stride > 1
        self.shortcut = nn.Conv2d(before, 4 * width, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(F.relu(norm(y)))
        return y + self.shortcut(x)


def residual_network(batch_size: int = 32) -> Case:
    """Make the 1,001-layer network for CIFAR-10."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    before = 16
    for stage, width in enumerate((16, 32, 64)):
        for block in range(BLOCKS):
            layers.append(_PreActivated(before, width, 2 if stage and not block else 1))
            before = 4 * width
    layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(before, 10))
    return model, (torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))), F.cross_entropy


class _UnrolledLSTM(nn.Module):
    """Layers of LSTM cells, one operator after the other, and a prediction at each time."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.into_gates = nn.ModuleList(
            nn.Linear(width if layer else features, 4 * width) for layer in range(layers)
        )
        self.between_gates = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        width = self.head.in_features
        states = [(x.new_zeros(x.shape[1], width), x.new_zeros(x.shape[1], width)) for _ in self.into_gates]
        predictions = []
        for value in x:
            for layer, (before, between) in enumerate(zip(self.into_gates, self.between_gates, strict=True)):
                hidden, cell = states[layer]
                gates = (before(value) + between(hidden)).chunk(4, 1)
                cell = torch.sigmoid(gates[1]) * cell + torch.sigmoid(gates[0]) * torch.tanh(gates[2])
                value = torch.sigmoid(gates[3]) * torch.tanh(cell)
                states[layer] = value, cell
            predictions.append(self.head(value))
        return predictions


def unrolled_lstm(batch_size: int = 64) -> Case:
    """Make four layers of 1,024 units, unrolled over 64 times, that tell 5,000 classes apart."""
    model = _UnrolledLSTM(50, 1024, 4, 5000)
    target = torch.randint(5000, (64, batch_size))
    return model, (torch.randn(64, batch_size, 50), target), _loss_of_times


def _loss_of_times(predictions: list[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    pairs = zip(predictions, target, strict=True)
    return torch.stack([F.cross_entropy(logits, wanted) for logits, wanted in pairs]).mean()


def u_net(batch_size: int = 8) -> Case:
    """Make Ronneberger et al.'s network with 64 channels for images of 256×256 pixels."""
    images, masks = torch.randn(batch_size, 3, 256, 256), torch.rand(batch_size, 1, 256, 256)
    return UNet(64, resolutions=5, bias=False), (images, masks), F.binary_cross_entropy_with_logits


def gpt2(batch_size: int = 8) -> Case:
    """Make GPT-2 small without dropout for texts of 512 tokens."""
    config = _transformers().GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return _language_model(config, batch_size)


def llama(batch_size: int = 4) -> Case:
    """Make a Llama of 16 layers of 1,024 features for texts of 512 tokens."""
    config = _transformers().LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=32000,
    )  # fmt: skip
    return _language_model(config, batch_size)


def _transformers() -> Any:
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # transformers imports it if it is installed
    return importlib.import_module("transformers")


def _language_model(config: Any, batch_size: int) -> Case:
    config.use_cache = False
    model = CausalLanguageModel(_transformers().AutoModelForCausalLM.from_config(config))
    text = torch.randint(config.vocab_size, (batch_size, 512))
    return model, (text, torch.randint(config.vocab_size, tuple(text.shape))), logits_loss
