"""Times small planned steps against eager's, in pairs: what a call costs beside its operators.

    python examples/benchmarks/small_steps.py
    python examples/benchmarks/small_steps.py --cases "160 parameters" --ways own-loop --pairs 300

Each pair runs an eager and a planned step one after the other, in alternating order, on models of the same
weights and on the same data. The figure is the median of the pairs' ratios (planned / eager) of processor
time, with the 95 % interval of a bootstrap. ``retained`` runs two backwards of each loss, the first with
``retain_graph=True``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from stopwatch import bootstrap_interval, paired
from torch import nn

import olla_fx
from olla_fx.models import build_model

WAYS = ("own-loop", "retained", "whole-step")
VISION = ("resnet18", "mobilenet_v2", "shufflenet_v2_x1_0", "squeezenet1_1", "mnasnet0_5")

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Block(nn.Module):
    """A block of a transformer that looks back alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


def cases() -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]]]:
    """Return what makes a model, its input, its target and its loss, by name."""

    def perceptron() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        return model, torch.randn(16, 32), torch.randn(16, 8), nn.functional.mse_loss

    def many() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
        layers = [layer for _ in range(80) for layer in (nn.Linear(8, 8), nn.Tanh())]
        return nn.Sequential(*layers), torch.randn(4, 8), torch.randn(4, 8), nn.functional.mse_loss

    def language() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
        blocks = [_Block(64, 4) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(256, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 256))
        tokens = torch.randint(256, (4, 32))
        return model, tokens, tokens.roll(-1, 1), _token_loss

    def vision(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
        case = build_model(f"torchvision:{name}", batch_size=2, image_size=32, train=True)
        image, target = case.inputs
        return case.model, image, target, case.loss_fn

    made = {"2 layers": perceptron, "160 parameters": many, "small GPT": language}
    return made | {name: partial(vision, name) for name in VISION}


def _token_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def measure(name: str, way: str, pairs: int) -> dict[str, object]:
    """Time one model's steps, trained in one way, in pairs."""
    torch.manual_seed(0)
    model, inputs, target, loss_fn = cases()[name]()
    eager_model = copy.deepcopy(model)
    eager_optimizer, optimizer = (torch.optim.SGD(owner.parameters(), 1e-3) for owner in (eager_model, model))

    def loop(module: nn.Module, own_optimizer: torch.optim.Optimizer) -> None:
        own_optimizer.zero_grad()
        loss = loss_fn(module(inputs), target)
        if way == "retained":
            loss.backward(retain_graph=True)
        loss.backward()
        own_optimizer.step()

    eager = partial(loop, eager_model, eager_optimizer)
    if way == "whole-step":
        step = olla_fx.optimize(model, (inputs, target), loss_fn=loss_fn, optimizer=optimizer)
        planned = partial(step, inputs, target)
    else:
        step = olla_fx.optimize(model, (inputs,))
        planned = partial(loop, step, optimizer)
    for _ in range(5):
        eager()
        planned()
    timed = [paired(eager, planned, index % 2 == 0, time.process_time) for index in range(pairs)]
    ratios = np.array([mine / theirs for theirs, mine in timed])
    return {
        "case": name,
        "way": way,
        "eager_ms": 1e3 * statistics.median(theirs for theirs, _ in timed),
        "planned_ms": 1e3 * statistics.median(mine for _, mine in timed),
        "ratio": float(np.median(ratios)),
        "interval": bootstrap_interval(ratios),
        "binding": step.stats.binding.value,
        "outside": step.stats.counts.outside,
    }


def main() -> None:
    """Time every case in every way and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(cases()), choices=list(cases()), metavar="NAME")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    print(f"{'model':<20} {'way':<11} {'eager ms':>9} {'planned ms':>10} {'ratio':>6}  95 % interval")
    for name in arguments.cases:
        for way in arguments.ways:
            row = measure(name, way, arguments.pairs)
            rows.append(row)
            low, high = row["interval"]
            print(
                f"{name:<20} {way:<11} {row['eager_ms']:>9.3f} {row['planned_ms']:>10.3f} "
                f"{row['ratio']:>6.3f}  [{low:.3f}, {high:.3f}]  {row['binding']} {row['outside']}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
