"""Times a planned step against eager's, in pairs, and an allocation that is served against the stock one's.

    python examples/benchmarks/speed.py
    python examples/benchmarks/speed.py --models torchvision:resnet18 --pairs 60 --json speed.json
    python examples/benchmarks/speed.py --own-loop

Each pair runs an eager and a planned step one after the other, in alternating order, on the same weights and
data. The figure is the median of the pairs' ratios (planned / eager), with the 95 % interval of a bootstrap.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from stopwatch import bootstrap_interval, paired
from torch import nn

import olla_fx
from olla_fx import arena
from olla_fx.models import build_model
from olla_fx.models.optimizers import optimizer_by_name

MODELS = ("torchvision:resnet18", "torchvision:vit_b_16", "transformers:xlm-roberta-base")


def main() -> None:
    """Time every model and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--own-loop", action="store_true", help="plan forward and backward; loss and update are eager in both"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(name, arguments) for name in arguments.models]
    print(f"{'model':<34} {'pairs':>5} {'eager s':>9} {'planned s':>9} {'ratio':>6}  95 % interval")
    for row in rows:
        low, high = row["interval"]
        print(
            f"{row['model']:<34} {row['pairs']:>5} {row['eager_seconds']:>9.4f} "
            f"{row['planned_seconds']:>9.4f} {row['ratio']:>6.3f}  [{low:.3f}, {high:.3f}]"
        )
    served, stock = allocation_seconds()
    print(f"an allocation: served {served * 1e9:.0f} ns, stock {stock * 1e9:.0f} ns")
    if arguments.json:
        document = {"steps": rows, "allocation_seconds": {"served": served, "stock": stock}}
        arguments.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Time one model's training steps in pairs."""
    case = build_model(
        name,
        batch_size=arguments.batch_size,
        tokens=arguments.tokens,
        image_size=arguments.image_size,
        train=True,
    )
    eager_model, loss_fn = copy.deepcopy(case.model), case.loss_fn
    eager_optimizer, optimizer = (
        optimizer_by_name("sgd", model.parameters()) for model in (eager_model, case.model)
    )
    *inputs, target = case.inputs

    def loop(model: nn.Module, own_optimizer: torch.optim.Optimizer) -> None:
        own_optimizer.zero_grad()
        loss_fn(model(*inputs), target).backward()
        own_optimizer.step()

    eager = partial(loop, eager_model, eager_optimizer)
    if arguments.own_loop:
        step = olla_fx.optimize(case.model, tuple(inputs))
        planned = partial(loop, step, optimizer)
    else:
        step = olla_fx.optimize(case.model, case.inputs, loss_fn=loss_fn, optimizer=optimizer)
        planned = partial(step, *case.inputs)
    for _ in range(3):
        eager()
        planned()
    pairs = [paired(eager, planned, index % 2 == 0) for index in range(arguments.pairs)]
    ratios = np.array([mine / theirs for theirs, mine in pairs])
    return {
        "model": f"{name} x{arguments.batch_size}",
        "pairs": len(pairs),
        "eager_seconds": statistics.median(theirs for theirs, _ in pairs),
        "planned_seconds": statistics.median(mine for _, mine in pairs),
        "ratio": float(np.median(ratios)),
        "interval": bootstrap_interval(ratios),
        "binding": step.stats.binding.value,
        "outside": step.stats.counts.outside,
    }


def allocation_seconds(count: int = 200_000) -> tuple[float, float]:
    """Time a small allocation and its free, served from a plan and by the stock allocator.

    The empty tensor's own cost is in both.
    """
    requests = [arena.PlannedRequest(0, ordinal, 4096, 0) for ordinal in range(count)]
    planned_arena = arena.Arena(arena.Buffer(4096), 1, requests)

    def run() -> float:
        started = time.perf_counter()
        for _ in range(count):
            torch.empty(1024)
        return (time.perf_counter() - started) / count

    served, stock = [], []
    for _ in range(5):
        stock.append(run())
        with planned_arena.region():
            planned_arena.begin_operator(0)
            served.append(run())
        if planned_arena.counts().outside:
            raise RuntimeError("an allocation was not served")
    return min(served), min(stock)


if __name__ == "__main__":
    main()
