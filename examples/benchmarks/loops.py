"""Times loops that change: lengths, batches, image sizes, masks, Python numbers; beside the same in eager.

    python examples/benchmarks/loops.py
    python examples/benchmarks/loops.py --cases "random lengths" DQN --ways own whole --steps 300

Among them are BERT on texts of random lengths with masks, plain and with a loss whose weight grows, a VAE
whose loss weighs the divergence more and more, a network whose results are divided by a temperature that
falls, images that grow while their batches shrink, DQN and REINFORCE. Others are as large as their inputs
say: chosen tokens, pairs of a class, rows for each of eight experts, texts cut to the longest one.

Times are those of whole loops, planning included; each loop has a process of its own, as a user's has, so
that the first capture includes what tracing imports. Each step is run in eager and planned, one right after
the other, from the same weights and random numbers; losses and weights must be equal to the last bit. Times
are processor time of one thread. A loop is fast enough if it takes at most eager's time and four times the
first capture, its second half at most 1.10 times eager's, and if 95 % of the steps of that half are planned.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from typing import Any

import torch
from loop_cases.batches import LOOPS
from loop_cases.reinforcement import OWN_LOOPS
from loop_cases.side import Planner

MOST_CAPTURES = 4.0
"""Beyond eager's time, what a whole loop may take, in first captures."""

MOST_IN_SECOND_HALF = 1.10
"""Times eager's."""

LEAST_PLANNED = 0.95
"""The share of the second half's steps that are to be planned."""

CASES = {**LOOPS, **OWN_LOOPS}


def measure(name: str, way: str, steps: int) -> dict[str, Any]:
    """Run a loop in eager and planned, in one thread.

    Args:
        name: of the loop.
        way: ``own`` for the caller's own loop, ``whole`` for whole training steps.
        steps: how many.

    Raises:
        SystemExit: if a loss or a weight differs.
    """
    torch.set_num_threads(1)
    planner = Planner(way)
    sides = CASES[name](Planner("eager"), steps), CASES[name](planner, steps)
    seconds: list[list[float]] = []
    planned_steps, eager_runs = [], 0
    for index in range(steps):
        losses, times = [], []
        for side in sides:
            torch.manual_seed(index)
            started = time.process_time()
            losses.append(side.run(index))
            times.append(time.process_time() - started)
        if not torch.equal(*losses):
            raise SystemExit(f"{name}, {way}: the losses of step {index} differ")
        seconds.append(times)
        planned_steps.append(planner.eager_runs == eager_runs)
        eager_runs = planner.eager_runs
    for models in zip(*(side.models for side in sides), strict=True):
        if not all(map(torch.equal, *(model.state_dict().values() for model in models))):
            raise SystemExit(f"{name}, {way}: the weights differ")
    eager_seconds, planned_seconds = map(sum, zip(*seconds, strict=True))
    eager_half, planned_half = map(sum, zip(*seconds[steps // 2 :], strict=True))
    return {
        "eager_seconds": eager_seconds,
        "planned_seconds": planned_seconds + planner.seconds,
        "capture_seconds": planner.seconds,
        "ratio": (planned_seconds + planner.seconds) / eager_seconds,
        "captures_beyond_eager": (planned_seconds + planner.seconds - eager_seconds) / planner.seconds,
        "ratio_of_second_half": planned_half / eager_half,
        "planned_share": sum(planned_steps[steps // 2 :]) / (steps - steps // 2),
        "slowest_steps": sorted((round(pair[1], 3) for pair in seconds), reverse=True)[:4],
    }


def is_slow(row: dict[str, Any]) -> bool:
    """Return True if a loop misses one of the bars."""
    return (
        row["captures_beyond_eager"] > MOST_CAPTURES
        or row["ratio_of_second_half"] > MOST_IN_SECOND_HALF
        or row["planned_share"] < LEAST_PLANNED
    )


def main() -> int:
    """Measure all loops and print a table; the exit status is 1 if one is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--ways", nargs="+", default=["own", "whole"], choices=["own", "whole"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    head = f"{'loop':<30}{'eager':>8}{'planned':>9}{'ratio':>7}{'capture':>9}{'beyond':>8}{'2nd half':>10}"
    print(f"{head}{'in plans':>10}")
    for name in arguments.cases:
        for way in arguments.ways:
            if way == "whole" and name in OWN_LOOPS:
                continue
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = figures[f"{name}, {way}"] = pool.apply(measure, (name, way, arguments.steps))
            print(
                f"{f'{name}, {way}':<30}{row['eager_seconds']:>6.1f} s{row['planned_seconds']:>7.1f} s"
                f"{row['ratio']:>7.2f}{row['capture_seconds']:>7.1f} s{row['captures_beyond_eager']:>7.1f}x"
                f"{row['ratio_of_second_half']:>10.3f}{row['planned_share']:>10.0%}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    slow = [name for name, row in figures.items() if is_slow(row)]
    if slow:
        print(f"too slow: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
