"""Loops over batches whose sizes, masks or Python numbers change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import counting
from .models import (
    VAE,
    WORDS,
    AnnealedLoss,
    ConvNet,
    Encoder,
    GrowingLoss,
    PaddedTexts,
    Tempered,
    squared_error,
    word_loss,
)
from .side import Case, Planner, Side


@dataclass(frozen=True)
class Loop:
    """A loop over batches.

    Attributes:
        make: makes the model; one with a method ``advance`` changes at every step.
        make_loss: makes the loss, of outputs and target; it may have such a method, too.
        batches: yields so many batches, the target last.
    """

    make: Callable[[], nn.Module]
    make_loss: Callable[[], Callable[..., torch.Tensor]]
    batches: Callable[[int], Iterator[tuple[Any, ...]]]

    def __call__(self, plan: Planner, steps: int) -> Side:
        """Make the loop; see :data:`Case`."""
        torch.manual_seed(0)
        model, loss_fn = self.make(), self.make_loss()
        batches = list(self.batches(steps))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if plan.way == "whole":
            step = plan(model, batches[0], loss_fn=loss_fn, optimizer=optimizer)
        else:
            step = plan(model, batches[0][:-1])

        def run(index: int) -> torch.Tensor:
            for changing in (loss_fn, model):
                if hasattr(changing, "advance"):
                    changing.advance(index, steps)
            *inputs, target = batches[index]
            if plan.way == "whole":
                return step(*inputs, target)  # type: ignore[no-any-return]
            optimizer.zero_grad()
            loss = loss_fn(step(*inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss.detach()

        return Side(run, [model])


def _words(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (batch, length)), torch.randint(WORDS, (batch, length))


def random_lengths(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of 8 texts of 16 to 128 words."""
    draw = random.Random(0)
    return (_words(8, draw.randint(16, 128)) for _ in range(steps))


def bucketed_lengths(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of ten lengths in turn."""
    return (_words(8, 16 + 12 * (step % 10)) for step in range(steps))


def tokens_per_batch(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of about 512 words: the longer the texts, the fewer."""
    draw = random.Random(0)
    lengths = (draw.randint(16, 128) for _ in range(steps))
    return (_words(max(2, 512 // length), length) for length in lengths)


def curriculum(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield images that grow while the batches shrink, in five stages."""
    stages = [(32, 16), (24, 20), (16, 24), (12, 28), (8, 32)]
    for step in range(steps):
        batch, size = stages[step * len(stages) // steps]
        yield torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def last_batches(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield epochs of nine batches of 16 images and one of 5."""
    for step in range(steps):
        batch = 5 if step % 10 == 9 else 16
        yield torch.randn(batch, 3, 24, 24), torch.randint(10, (batch,))


def padded(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of 8 texts of up to 128 words with masks; in every seventh all are of one length."""
    draw = random.Random(0)
    for step in range(steps):
        longest = draw.randint(16, 128)
        lengths = [longest, *(longest if step % 7 == 3 else draw.randint(4, longest) for _ in range(7))]
        mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        yield torch.randint(WORDS, (8, longest)), mask.long(), torch.randint(10, (8,))


def digits(steps: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of 128 images, which are their own targets; eight in turn."""
    images = [torch.rand(128, 1, 28, 28) for _ in range(8)]
    return ((images[step % 8], images[step % 8]) for step in range(steps))


LOOPS: dict[str, Case] = {
    "random lengths": Loop(Encoder, lambda: word_loss, random_lengths),
    "bucketed lengths": Loop(Encoder, lambda: word_loss, bucketed_lengths),
    "tokens per batch": Loop(Encoder, lambda: word_loss, tokens_per_batch),
    "curriculum of images": Loop(ConvNet, lambda: F.cross_entropy, curriculum),
    "smaller last batches": Loop(ConvNet, lambda: F.cross_entropy, last_batches),
    "padded": Loop(PaddedTexts, lambda: F.cross_entropy, padded),
    "padded, growing weight": Loop(PaddedTexts, GrowingLoss, padded),
    "annealed VAE": Loop(VAE, AnnealedLoss, digits),
    "temperature": Loop(Tempered, lambda: squared_error, digits),
    "labelled tokens": Loop(counting.TokenClassifier, lambda: counting.token_loss, counting.labelled_tokens),
    "pairs of a class": Loop(counting.Contrasting, lambda: counting.contrastive_loss, counting.classes),
    "experts": Loop(counting.Experts, lambda: F.cross_entropy, counting.routed_rows),
    "longest text": Loop(counting.Trimmed, lambda: F.cross_entropy, counting.padded_to_most),
}
