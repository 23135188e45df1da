"""Defines the models that the cases train beside those of torchvision and transformers."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class CheckpointedBlocks(nn.Module):
    """Residual blocks of which only the inputs are kept for backward."""

    def __init__(self, count: int, width: int, dropout: float) -> None:
        """Make the blocks and a head of ten classes.

        Args:
            count: how many blocks.
            width: features of each row.
            dropout: share of a block's hidden features, four times as many, that is dropped.
        """
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
            )
            for _ in range(count)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a batch of rows."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _double_convolution(before: int, after: int, bias: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        convolution = nn.Conv2d(channels, after, 3, padding=1, bias=bias)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al.'s network."""

    def __init__(self, width: int, resolutions: int = 4, *, bias: bool = True) -> None:
        """Make the layers.

        Args:
            width: channels of the first resolution; they double with each further one.
            resolutions: the number of these; each is half the one before.
            bias: True if what comes before a normalisation adds one.
        """
        super().__init__()
        widths = [width << level for level in range(resolutions)]
        self.down = nn.ModuleList(
            _double_convolution(before, after, bias) for before, after in itertools.pairwise([3, *widths])
        )
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, 2) for wide in widths[-2::-1])
        self.up = nn.ModuleList(_double_convolution(2 * wide, wide, bias) for wide in widths[-2::-1])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a mask's logits."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([kept.pop(), rise(x)], 1))
        return self.out(x)


class _GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.before(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class SmallGPT(nn.Module):
    """A language model as in GPT-2, with learned positions."""

    def __init__(self, layers: int, width: int, tokens: int, vocabulary: int = 2048) -> None:
        """Make the layers.

        Args:
            layers: how many blocks.
            width: features of each token.
            tokens: the longest text.
            vocabulary: how many different tokens.
        """
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(_GPTBlock(width, max(width // 64, 1)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the token after each one."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.tokens(text) + self.places(places))))


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """A language model of stacked LSTM layers."""

    def __init__(self, width: int, layers: int, vocabulary: int = 2048) -> None:
        """Make the layers.

        Args:
            width: features of each token.
            layers: how many LSTM layers.
            vocabulary: how many different tokens.
        """
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the token after each one."""
        return self.head(self.lstm(self.tokens(text))[0])


NOISE = 64
"""Channels of the noise that a generator starts from."""


def generator(width: int) -> nn.Sequential:
    """Return a DCGAN's generator of 64×64 images.

    Args:
        width: channels of its last hidden layer.
    """
    layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE, 8 * width, 4, 1, 0, bias=False)]
    for wide in (8 * width, 4 * width, 2 * width):
        layers += [
            nn.BatchNorm2d(wide), nn.ReLU(True), nn.ConvTranspose2d(wide, wide // 2, 4, 2, 1, bias=False),
        ]  # fmt: skip
    layers += [nn.BatchNorm2d(width), nn.ReLU(True), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False)]
    return nn.Sequential(*layers, nn.Tanh())


def discriminator(width: int) -> nn.Sequential:
    """Return a DCGAN's discriminator of 64×64 images; it gives logits.

    Args:
        width: channels of its first hidden layer.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for wide in (width, 2 * width, 4 * width):
        layers += [
            nn.Conv2d(wide, 2 * wide, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * wide),
            nn.LeakyReLU(0.2, inplace=True),
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))
