"""Small models whose inputs come in many sizes."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 50


class Encoder(nn.Module):
    """Transformer layers over words."""

    def __init__(self, dropout: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=dropout)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x):
        return self.head(self.layers(self.words(x)))


class Decoder(nn.Module):
    """A causal language model with learned positions, as nanoGPT's."""

    def __init__(self, longest: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(longest, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, x):
        batch, length = x.shape
        hidden = self.words(x) + self.positions(torch.arange(length, device=x.device))
        parts = self.qkv(self.norm(hidden)).chunk(3, -1)
        q, k, v = (part.view(batch, length, 2, 8).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(hidden + self.out(attended.transpose(1, 2).reshape(batch, length, 16)))


class ConvNet(nn.Module):
    """Convolutions that take images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.SiLU(inplace=True),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    """A GRU over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = (
            nn.Embedding(WORDS, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        return self.head(self.body(self.words(x))[0][:, -1])


class Unrolled(nn.Module):
    """A cell in a Python loop over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(WORDS, 8), nn.GRUCell(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        hidden = torch.zeros(x.shape[0], 8)
        for step in range(x.shape[1]):
            hidden = self.cell(self.words(x[:, step]), hidden)
        return self.head(hidden)


def word_loss(outputs, target):
    """Cross entropy of every word."""
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


def words(batch: int, length: int):
    """Words, and a word to predict for each."""
    return torch.randint(WORDS, (batch, length)), torch.randint(WORDS, (batch, length))


def texts(batch: int, length: int):
    """Words, and a class for each text."""
    return torch.randint(WORDS, (batch, length)), torch.randint(5, (batch,))


def vectors(batch: int, features: int = 12):
    """Vectors with classes."""
    return torch.randn(batch, features), torch.randint(5, (batch,))


def images(batch: int, size: int = 16):
    """Images with classes."""
    return torch.randn(batch, 3, size, size), torch.randint(5, (batch,))
