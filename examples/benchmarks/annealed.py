"""Times loops in which a Python number changes at every step: whole loops, planning included, beside eager's.

    python examples/benchmarks/annealed.py
    python examples/benchmarks/annealed.py --loops own --steps 300

A VAE whose loss weighs the divergence more and more, and a network whose results are divided by a
temperature that falls. Each step is run in eager and planned, one right after the other, from the same
weights and random numbers; losses and weights must be equal to the last bit. Times are processor time of
one thread. A loop is fast enough if it takes at most eager's time and four times the first capture, and its
second half at most 1.10 times eager's.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import olla_fx

MOST_CAPTURES = 4.0
"""Beyond eager's time, what a whole loop may take, in first captures."""

MOST_IN_SECOND_HALF = 1.10
"""Times eager's."""


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


def squared_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of a batch."""
    return F.mse_loss(outputs, target.flatten(1))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Callable[..., torch.Tensor]]]] = {
    "annealed VAE": (VAE, AnnealedLoss),
    "temperature": (Tempered, lambda: squared_error),
}


def measure(name: str, kind: str, steps: int) -> dict[str, float]:
    """Run a loop in eager and planned.

    Args:
        name: of the case.
        kind: ``own`` for the caller's own loop, ``whole`` for whole training steps.
        steps: how many.

    Raises:
        SystemExit: if a loss or a weight differs.
    """
    torch.manual_seed(0)
    make, make_loss = CASES[name]
    model, loss_fn = make(), make_loss()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(half.parameters(), lr=1e-3) for half in (eager, model)]
    batches = [torch.rand(128, 1, 28, 28) for _ in range(8)]
    started = time.process_time()
    if kind == "whole":
        step = olla_fx.optimize(model, (batches[0], batches[0]), loss_fn=loss_fn, optimizer=optimizers[1])
    else:
        step = olla_fx.optimize(model, batches[0])
    capture_seconds = time.process_time() - started

    def run(called: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        if kind == "whole" and called is step:
            loss: torch.Tensor = step(batch, batch)
            return loss
        optimizer.zero_grad()
        loss = loss_fn(called(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    seconds: list[list[float]] = []
    for index in range(steps):
        for changing in (loss_fn, eager, model):
            if isinstance(changing, AnnealedLoss | Tempered):
                changing.advance(index, steps)
        losses, times = [], []
        for called, optimizer in ((eager, optimizers[0]), (step, optimizers[1])):
            torch.manual_seed(index)
            started = time.process_time()
            losses.append(run(called, optimizer, batches[index % len(batches)]))
            times.append(time.process_time() - started)
        if not torch.equal(*losses):
            raise SystemExit(f"the losses of step {index} differ")
        seconds.append(times)
    if not all(map(torch.equal, eager.parameters(), model.parameters())):
        raise SystemExit("the weights differ")
    in_eager, planned = (sum(times) for times in zip(*seconds, strict=True))
    of_half = [sum(times) for times in zip(*seconds[steps // 2 :], strict=True)]
    return {
        "eager": in_eager,
        "planned": planned + capture_seconds,
        "capture": capture_seconds,
        "beyond": (planned + capture_seconds - in_eager) / capture_seconds,
        "second half": of_half[1] / of_half[0],
        "plans": step.stats.cached_plans,
        "eager runs": step.stats.eager_runs,
    }


def main() -> int:
    """Measure all loops and print a table; the exit status is 1 if one is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--loops", nargs="+", default=["own", "whole"], choices=["own", "whole"])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("eager", "planned", "capture", "beyond", "second half", "plans", "eager runs")
    print(f"{'loop':<24}" + "".join(f"{column:>12}" for column in columns))
    is_slow = False
    for name in arguments.cases:
        for kind in arguments.loops:
            row = measure(name, kind, arguments.steps)
            figures = "".join(f"{row[column]:>12.3g}" for column in columns)
            print(f"{f'{name}, {kind}':<24}{figures}", flush=True)
            is_slow |= row["beyond"] > MOST_CAPTURES or row["second half"] > MOST_IN_SECOND_HALF
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
