"""Small models of many kinds whose steps are recomputed, with batches for them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from tests.olla_fx.helpers import images, vectors


def conv(inputs, outputs):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def head(channels):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


class Residual(nn.Module):
    """Activations in place, a sum in place, batch norms with running statistics."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.second = conv(channels, channels), conv(channels, channels)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        inner = self.norms[1](self.second(self.act(self.norms[0](self.first(x)))))
        inner += x
        return self.act(inner)


def frozen(channels):
    """Batch norms with given statistics, which write over their inputs."""
    block = Residual(channels)
    for norm in block.norms:
        norm.eval().requires_grad_(False)
        norm.train = lambda mode=True, norm=norm: norm
    return block


class Skip(nn.Module):
    """A U-Net of one level: what the first half makes is read again at the end."""

    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = conv(3, 4), conv(4, 6), conv(10, 4)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.norm(self.down(x)).relu()
        deep = self.deep(F.max_pool2d(x, 2)).relu()
        return self.up(torch.cat([x, F.interpolate(deep, scale_factor=2)], 1)).relu()


class Transformer(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(16, 2, 32, dropout, F.gelu, batch_first=True, norm_first=first)
                for first in (True, False)
            ]
        )
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean(1)


class Recurrent(nn.Module):
    """Gates in place on slices of one matrix."""

    def __init__(self, kind=nn.LSTMCell):
        super().__init__()
        self.cell, self.head = kind(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        state = None
        for time in range(2):
            state = self.cell(x * (time + 1), state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Layers(nn.Module):
    """A recurrent layer of PyTorch's own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 8, 2, batch_first=True, dropout=0.2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Shared(nn.Module):
    """One layer three times."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        for _ in range(3):
            x = x + F.gelu(self.layer(self.norm(x)))
        return self.head(x)


def tokens(count):
    generator = torch.Generator().manual_seed(3)
    draw = partial(torch.randint, generator=generator)
    return [(draw(11, (2, 7)), draw(11, (2,))) for _ in range(count)]


def sequences(count):
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(2, 5, 6, generator=generator), torch.randint(3, (2,), generator=generator))
        for _ in range(count)
    ]


MODELS = {
    "residual": (
        lambda: nn.Sequential(conv(3, 4), Residual(4), nn.Dropout(0.3), Residual(4), head(4)), images),
    "frozen": (lambda: nn.Sequential(conv(3, 4), frozen(4), nn.GELU(), frozen(4), head(4)), images),
    "skip": (lambda: nn.Sequential(Skip(), head(4)), images),
    "activations": (
        lambda: nn.Sequential(
            conv(3, 4), nn.SiLU(True), nn.GroupNorm(2, 4), conv(4, 4), nn.ELU(inplace=True), conv(4, 4),
            nn.Hardswish(True), nn.BatchNorm2d(4, track_running_stats=False), nn.Dropout2d(0.2),
            nn.LeakyReLU(0.1, True), nn.MaxPool2d(2), conv(4, 4), nn.ReLU6(True), head(4),
        ),
        images,
    ),
    "transformer": (Transformer, tokens),
    "lstm cell": (Recurrent, vectors),
    "gru cell": (partial(Recurrent, nn.GRUCell), vectors),
    "lstm": (Layers, sequences),
    "shared": (Shared, vectors),
}  # fmt: skip
