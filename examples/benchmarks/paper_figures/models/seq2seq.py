"""Sequence to sequence with LSTMs, after Sutskever, Vinyals, Le (2014), in the sizes of Chainer's example.

Three layers of 1,024 units and 40,000 words on each side. Sentences are cut to 50 words for training;
inference always generates 100 words, each from the one before ("Profile-guided memory optimization" §5.3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 40_000
UNITS = 1024
LAYERS = 3
DROPOUT = 0.1
TRAINING_LENGTH = 50
GENERATED_LENGTH = 100


class Seq2Seq(nn.Module):
    """Reads a sentence into an LSTM's state, from which another LSTM writes one."""

    def __init__(self) -> None:
        """Make the embeddings, both LSTMs and the output layer."""
        super().__init__()
        self.source_words = nn.Embedding(WORDS, UNITS)
        self.target_words = nn.Embedding(WORDS, UNITS)
        self.encoder = nn.LSTM(UNITS, UNITS, LAYERS, dropout=DROPOUT)
        self.decoder = nn.LSTM(UNITS, UNITS, LAYERS, dropout=DROPOUT)
        self.output = nn.Linear(UNITS, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute the logits of every next word if training; else the generated words.

        Args:
            source: word numbers, a sentence in each column.
            target: the words to write, of which inference takes the first alone.
        """
        _, state = self.encoder(self.source_words(source))
        if self.training:
            hidden, _ = self.decoder(self.target_words(target), state)
            return self.output(hidden)
        word, written = target[:1], []
        for _ in range(GENERATED_LENGTH):
            hidden, state = self.decoder(self.target_words(word), state)
            word = self.output(hidden).argmax(dim=-1)
            written.append(word)
        return torch.cat(written)


def loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of every word."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def seq2seq(batch_size: int = 1):
    """Return model, example and loss."""
    source, target, following = (torch.randint(WORDS, (TRAINING_LENGTH, batch_size)) for _ in range(3))
    return Seq2Seq(), (source, target, following), loss
