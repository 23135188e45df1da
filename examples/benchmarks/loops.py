"""Times loops that change: lengths, batches, image sizes, masks, Python numbers; beside the same in eager.

    python examples/benchmarks/loops.py
    python examples/benchmarks/loops.py --cases "random lengths" padded --loops own whole --steps 300

Among them are BERT on texts of random lengths with masks, plain and with a loss whose weight grows, a VAE
whose loss weighs the divergence more and more, and a network whose results are divided by a temperature that
falls.

Times are those of whole loops, planning included. Each step is run in eager and planned, one right after the
other, from the same weights and random numbers; losses and weights must be equal to the last bit. Times are
processor time of one thread. A loop is fast enough if it takes at most eager's time and four times the first
capture, and its second half at most 1.10 times eager's.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import olla_fx
from olla_fx.models import import_torchvision

WORDS = 1000
MOST_CAPTURES = 4.0
"""Beyond eager's time, what a whole loop may take, in first captures."""

MOST_IN_SECOND_HALF = 1.10
"""Times eager's."""


@dataclass(frozen=True)
class Loop:
    """A loop that changes.

    Attributes:
        make: makes the model; one with a method ``advance`` changes at every step.
        make_loss: makes the loss, of outputs and target; it may have such a method, too.
        batches: yields so many batches, the target last.
    """

    make: Callable[[], nn.Module]
    make_loss: Callable[[], Callable[..., torch.Tensor]]
    batches: Callable[[int], Iterator[tuple[Any, ...]]]


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


LOOPS = {
    "random lengths": Loop(Encoder, lambda: word_loss, random_lengths),
    "bucketed lengths": Loop(Encoder, lambda: word_loss, bucketed_lengths),
    "tokens per batch": Loop(Encoder, lambda: word_loss, tokens_per_batch),
    "curriculum of images": Loop(ConvNet, lambda: F.cross_entropy, curriculum),
    "smaller last batches": Loop(ConvNet, lambda: F.cross_entropy, last_batches),
    "padded": Loop(PaddedTexts, lambda: F.cross_entropy, padded),
    "padded, growing weight": Loop(PaddedTexts, GrowingLoss, padded),
    "annealed VAE": Loop(VAE, AnnealedLoss, digits),
    "temperature": Loop(Tempered, lambda: squared_error, digits),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def measure(loop: Loop, kind: str, steps: int) -> dict[str, Any]:
    """Run a loop in eager and planned.

    Args:
        loop: what to run.
        kind: ``own`` for the caller's own loop, ``whole`` for whole training steps.
        steps: how many.

    Raises:
        SystemExit: if a loss or a weight differs.
    """
    torch.manual_seed(0)
    model, loss_fn = loop.make(), loop.make_loss()
    eager = copy.deepcopy(model)
    optimizers = adamw(eager), adamw(model)
    batches = list(loop.batches(steps))
    started = time.process_time()
    if kind == "whole":
        step = olla_fx.optimize(model, batches[0], loss_fn=loss_fn, optimizer=optimizers[1])
    else:
        step = olla_fx.optimize(model, batches[0][:-1])
    capture_seconds = time.process_time() - started

    def own_step(called: Callable[..., Any], batch: tuple[Any, ...], optimizer: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(called(*batch[:-1]), batch[-1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    seconds: list[tuple[float, float]] = []
    planned_steps, eager_runs = [], 0
    for index, batch in enumerate(batches):
        for changing in (loss_fn, eager, model):
            advance = getattr(changing, "advance", None)
            if advance is not None:
                advance(index, steps)
        losses, times = [], []
        for called, optimizer in ((eager, optimizers[0]), (step, optimizers[1])):
            torch.manual_seed(index)
            started = time.process_time()
            if kind == "whole" and called is step:
                losses.append(step(*batch))
            else:
                losses.append(own_step(called, batch, optimizer))
            times.append(time.process_time() - started)
        if not torch.equal(*losses):
            raise SystemExit(f"the losses of step {index} differ")
        seconds.append((times[0], times[1]))
        planned_steps.append(step.stats.eager_runs == eager_runs)
        eager_runs = step.stats.eager_runs
    if not all(map(torch.equal, eager.parameters(), model.parameters())):
        raise SystemExit("the weights differ")
    half = seconds[steps // 2 :]
    eager_seconds = sum(pair[0] for pair in seconds)
    planned_seconds = sum(pair[1] for pair in seconds) + capture_seconds
    return {
        "eager_seconds": eager_seconds,
        "planned_seconds": planned_seconds,
        "capture_seconds": capture_seconds,
        "ratio": planned_seconds / eager_seconds,
        "captures_beyond_eager": (planned_seconds - eager_seconds) / capture_seconds,
        "ratio_of_second_half": sum(pair[1] for pair in half) / sum(pair[0] for pair in half),
        "planned_share": sum(planned_steps[steps // 2 :]) / len(half),
        "slowest_steps": sorted((round(pair[1], 3) for pair in seconds), reverse=True)[:4],
    }


def main() -> int:
    """Measure all loops and print a table; the exit status is 1 if one is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(LOOPS), choices=LOOPS, metavar="NAME")
    parser.add_argument("--loops", nargs="+", default=["own", "whole"], choices=["own", "whole"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, dict[str, Any]] = {}
    head = f"{'loop':<30}{'eager':>8}{'planned':>9}{'ratio':>7}{'capture':>9}{'beyond':>8}{'2nd half':>10}"
    print(f"{head}{'in plans':>10}")
    for name in arguments.cases:
        for kind in arguments.loops:
            row = figures[f"{name}, {kind}"] = measure(LOOPS[name], kind, arguments.steps)
            print(
                f"{f'{name}, {kind}':<30}{row['eager_seconds']:>6.1f} s{row['planned_seconds']:>7.1f} s"
                f"{row['ratio']:>7.2f}{row['capture_seconds']:>7.1f} s{row['captures_beyond_eager']:>7.1f}x"
                f"{row['ratio_of_second_half']:>10.3f}{row['planned_share']:>10.0%}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    slow = [
        name
        for name, row in figures.items()
        if row["captures_beyond_eager"] > MOST_CAPTURES or row["ratio_of_second_half"] > MOST_IN_SECOND_HALF
    ]
    if slow:
        print(f"too slow: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
