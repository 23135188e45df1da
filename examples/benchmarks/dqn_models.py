"""Defines the models of the DQN planner's benchmark that no other file has.

A character-level LSTM of two layers, unrolled (the paper's is Karpathy's char-RNN), and the ResNets of
``paper_figures/models/cifar.py`` with stochastic depth (Huang et al., 2016): one step's structure, in which
blocks are left out by chance, the later ones more often. Each function makes ``(model, example, loss_fn)``.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import torch
from budget_models import Case, _loss_of_times, _UnrolledLSTM
from torch import nn

CHARACTERS, WIDTH, LAYERS, TIMES = 128, 512, 2, 16

LAST_SURVIVES = 0.5
"""The chance of the last block; the first one's is nearly 1, and those between fall linearly."""


def char_rnn(batch_size: int = 64) -> Case:
    """Make the LSTM."""
    model = _UnrolledLSTM(CHARACTERS, WIDTH, LAYERS, CHARACTERS)
    target = torch.randint(CHARACTERS, (TIMES, batch_size))
    return model, (torch.randn(TIMES, batch_size, CHARACTERS), target), _loss_of_times


class _Skipped(nn.Module):
    """A block of which the shortcut alone is left."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.shortcut = block.downsample or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.shortcut(x))


def _with_stochastic_depth(name: str, draw: int):
    def make(batch_size: int = 100) -> Case:
        path = Path(__file__).parent / "paper_figures" / "models" / "cifar.py"
        spec = importlib.util.spec_from_file_location("cifar", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be read")
        cifar = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cifar)
        model, example, loss = getattr(cifar, name)(batch_size)
        stages = [model.layer1, model.layer2, model.layer3, model.layer4]
        blocks = [(stage, index) for stage in stages for index in range(len(stage))]
        drawn = random.Random(draw)
        for place, (stage, index) in enumerate(blocks, start=1):
            if drawn.random() > 1 - (1 - LAST_SURVIVES) * place / len(blocks):
                stage[index] = _Skipped(stage[index])
        return model, example, loss

    return make


stochastic_resnet34 = _with_stochastic_depth("resnet34", 1)
