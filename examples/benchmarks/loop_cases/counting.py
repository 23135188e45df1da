"""Models and batches whose steps are as large as numbers that their inputs answer: counts and lengths.

Chosen tokens, pairs of one class, rows for an expert, the longest text: loops of them are among those of
``loops.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .models import WORDS

IGNORED = -100


class TokenClassifier(nn.Module):
    """A Transformer that labels those words that have a label."""

    def __init__(self, width: int = 128, layers: int = 4, labels: int = 20) -> None:
        """Make the layers."""
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, labels)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return scores for the words that have a label."""
        scores: torch.Tensor = self.head(self.layers(self.words(x))[labels != IGNORED])
        return scores


def token_loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the words that have a label."""
    return F.cross_entropy(scores, target[target != IGNORED])


def labelled_tokens(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of 8 texts of 64 words, some of which have a label."""
    for _ in range(steps):
        labels = torch.randint(20, (8, 64)).masked_fill(torch.rand(8, 64) < 0.3, IGNORED)
        yield torch.randint(WORDS, (8, 64)), labels, labels


class Contrasting(nn.Module):
    """Returns the similarity of every pair of images, and whether they are of one class."""

    def __init__(self, width: int = 512) -> None:
        """Make the layers."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the similarities."""
        features = F.normalize(self.head(self.body(x)), dim=1)
        return features @ features.T / 0.1


def contrastive_loss(similar: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the normalised temperature-scaled cross entropy of pairs of one class."""
    others = ~torch.eye(len(target), dtype=torch.bool)
    same = target[:, None] == target[None]
    rows = similar[others].view(len(target), -1)
    chances: torch.Tensor = F.log_softmax(rows, dim=1)
    return -chances[same[others].view(len(target), -1)].mean()


def classes(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of 128 images of ten classes."""
    return ((torch.rand(128, 1, 28, 28), torch.randint(10, (128,))) for _ in range(steps))


class Experts(nn.Module):
    """Sends each row to the expert that an input names."""

    def __init__(self, width: int = 256, experts: int = 8) -> None:
        """Make the layers."""
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Return scores for every row."""
        x = self.first(x)
        result = torch.zeros_like(x)
        for index, module in enumerate(self.experts):
            (rows,) = torch.where(expert == index)
            result = result.index_add(0, rows, module(x[rows]))
        scores: torch.Tensor = self.head(x + result)
        return scores


def routed_rows(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of 512 rows with their experts."""
    return (
        (torch.randn(512, 256), torch.randint(8, (512,)), torch.randint(10, (512,))) for _ in range(steps)
    )


class Trimmed(nn.Module):
    """A Transformer on texts that are padded more than they need."""

    def __init__(self, width: int = 128) -> None:
        """Make the layers."""
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return scores for every text."""
        longest = int(lengths.max())
        is_padding = torch.arange(longest)[None] >= lengths[:, None]
        hidden = self.layers(self.words(x[:, :longest]), src_key_padding_mask=is_padding)
        total = hidden.masked_fill(is_padding[..., None], 0).sum(1)
        scores: torch.Tensor = self.head(total / lengths[:, None])
        return scores


def padded_to_most(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of 8 texts of up to 128 words, all padded to 128, with their lengths."""
    draw = random.Random(0)
    for _ in range(steps):
        longest = draw.randint(16, 128)
        lengths = torch.tensor([longest, *(draw.randint(4, longest) for _ in range(7))])
        yield torch.randint(WORDS, (8, 128)), lengths, torch.randint(10, (8,))
