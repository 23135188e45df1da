"""The models and losses of the loops; those with a method ``advance`` change at every step."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.models import import_torchvision

WORDS = 1000


class Encoder(nn.Module):
    """A Transformer that labels every word."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        """Make the layers."""
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores for every word."""
        scores: torch.Tensor = self.head(self.layers(self.words(x)))
        return scores


class ConvNet(nn.Module):
    """Convolutions for images of any size."""

    def __init__(self, widths: tuple[int, ...] = (3, 32, 64, 128)) -> None:
        """Make the layers."""
        super().__init__()
        blocks = [
            nn.Sequential(
                nn.Conv2d(before, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            )
            for before, width in itertools.pairwise(widths)
        ]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores for every class."""
        scores: torch.Tensor = self.head(self.body(x).mean((2, 3)))
        return scores


class VAE(nn.Module):
    """A variational autoencoder of images of 28 x 28."""

    def __init__(self, width: int = 512, code: int = 32) -> None:
        """Make the layers."""
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 2 * code)
        )
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 784))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the reconstruction, and mean and logarithm of the variance of the code."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


class AnnealedLoss:
    """The negative evidence lower bound, its divergence weighed more and more."""

    def __init__(self) -> None:
        """Begin with a small weight."""
        self.weight = 0.0

    def advance(self, step: int, steps: int) -> None:
        """Set the weight for a step."""
        self.weight = min(1.0, 2.0 * (step + 1) / steps)

    def __call__(self, outputs: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        reconstruction, mean, log_variance = outputs
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(reconstruction, target.flatten(1), reduction="sum") / len(target) + (
            self.weight * divergence
        )


class Tempered(nn.Module):
    """A network on images of 28 x 28, with a temperature."""

    def __init__(self, width: int = 512) -> None:
        """Make the layers."""
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 784)
        self.temperature = 5.0

    def advance(self, step: int, steps: int) -> None:
        """Set the temperature for a step."""
        self.temperature = 5.0 - 4.0 * step / steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        scores: torch.Tensor = self.head(self.body(x)) / self.temperature
        return scores


class PaddedTexts(nn.Module):
    """A small BERT that labels texts, of which a mask hides the padding."""

    def __init__(self) -> None:
        """Make the model."""
        super().__init__()
        import_torchvision()
        import transformers

        config = transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=256,
            num_labels=10,
        )
        self.body = transformers.BertForSequenceClassification(config)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return scores for every text."""
        scores: torch.Tensor = self.body(input_ids=x, attention_mask=mask).logits
        return scores


class GrowingLoss:
    """Cross entropy with a weight that grows."""

    def __init__(self) -> None:
        """Begin with a small weight."""
        self.weight = 0.1

    def advance(self, step: int, steps: int) -> None:
        """Set the weight for a step."""
        self.weight = 0.1 + 0.9 * step / steps

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.weight * F.cross_entropy(outputs, target)


def squared_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of a batch."""
    return F.mse_loss(outputs, target.flatten(1))


def word_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all words."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())
