"""Runs steps within memory budgets: measured extra time and peak beside what is predicted and proven.

    python examples/benchmarks/budget_measured.py
    python examples/benchmarks/budget_measured.py --models torchvision:resnet18 --shares 0.6 --pairs 30

Each pair runs a step without recomputation and one within the budget, one right after the other, in
alternating order, in processor time of one thread. Measured is the median of the pairs' ratios, with the 95 %
interval of a bootstrap; predicted is what the settled plan says, by the seconds that were measured in its
recorded run. The peak is the most that a settled step requests at once, in the buffer and outside. The exit
status is 1 if one is above its budget.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import kept_figures
import numpy as np
import torch
from budget_tables import in_markdown, mib
from stopwatch import bootstrap_interval, paired

import olla_fx
from olla_fx.eager.baseline import baseline_from_events
from olla_fx.models import ModelCase, build_model, optimizer_by_name

SIZES = {
    "torchvision:resnet18": {"batch_size": 8, "image_size": 112},
    "torchvision:resnet50": {"batch_size": 4, "image_size": 112},
    "transformers:vit": {"batch_size": 4, "image_size": 224},
    "transformers:gpt2": {"batch_size": 8, "tokens": 128},
}
"""Models, with what keeps a step below some seconds."""

SETTLING = 6
"""Calls until a plan is settled: a choice may be made again after each of the first recorded runs."""

HEADER = (
    "step", "budget", "without, MiB", "budget, MiB", "peak, MiB", "s", "proven, %", "predicted, %",
    "measured, %", "95 % interval", "measured / predicted",
)  # fmt: skip


def planned_step(case: ModelCase, **options: Any) -> olla_fx.PlannedModule:
    """Return a planned step of a copy of the model, settled."""
    model = copy.deepcopy(case.model)
    optimizer = optimizer_by_name("sgd", model.parameters())
    step = olla_fx.optimize(model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, **options)
    for _ in range(SETTLING):
        step(*case.inputs)
    return step


def measure(name: str, share: float, pairs: int) -> dict[str, Any]:
    """Plan a step without recomputation and within a share of what that needs, and run both."""
    torch.manual_seed(0)
    case = build_model(name, **SIZES[name])
    without, within = planned_step(case, recompute=0), planned_step(case, memory_budget=share)
    plain, budgeted = (functools.partial(step, *case.inputs) for step in (without, within))
    times = [paired(plain, budgeted, index % 2 == 0, time.process_time) for index in range(pairs)]
    ratios = np.array([later / earlier for earlier, later in times])
    with olla_fx.record() as recording:
        budgeted()
    return {
        "step": " ".join((name, *map(str, SIZES[name].values()))),
        "share": share,
        "plain_bytes": without.plan.needed_bytes,
        "budget_bytes": within.plan.memory_budget_bytes,
        "needed_bytes": within.plan.needed_bytes,
        "peak_bytes": baseline_from_events(recording.events).live_peak_bytes,
        "plain_seconds": statistics.median(earlier for earlier, _ in times),
        "extra_time_bound": within.plan.extra_time_bound,
        "extra_time": within.plan.extra_time,
        "measured": float(np.median(ratios)) - 1,
        "interval": [end - 1 for end in bootstrap_interval(ratios)],
    }


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table."""
    low, high = row["interval"]
    times = (row["extra_time_bound"], row["extra_time"], row["measured"])
    return (
        row["step"],
        f"{row['share']:g}",
        *(mib(row[f"{key}_bytes"]) for key in ("plain", "budget", "peak")),
        f"{row['plain_seconds']:.2f}",
        *(f"{100 * extra:.1f}" for extra in times),
        f"{100 * low:.1f} to {100 * high:.1f}",
        f"{row['measured'] / row['extra_time']:.2f}" if row["extra_time"] else "",
    )


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=(0.7, 0.5), metavar="SHARE")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        for share in options.shares:
            rows.append(measure(name, share, options.pairs))
            print(*line(rows[-1]), sep="  ", file=sys.stderr)
            kept_figures.keep(options.json, rows)
    print(in_markdown(HEADER, map(line, rows)))
    return 1 if any(row["peak_bytes"] > row["budget_bytes"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
