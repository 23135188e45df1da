"""Swaps as AutoSwap does: Table II and Figures 8, 9 and 11 of its paper, in the simulator of swapping.

Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems". Loads are the paper's: all
bytes on the device, weights and momenta included. Seconds are estimates for a GTX 1080 Ti, the same stretched
to the paper's measured iteration, and for an A100; nothing runs. Beside AutoSwap's scores and what combines
them stand swapping by least recent use (SuperNeurons) and by longest reuse (TFLMS).

Figures are kept in a file, and parts of them can be made anew; tables and plot are of that file:

    python examples/benchmarks/swapping.py --json swapping.json --plot docs/swapping.png
    python examples/benchmarks/swapping.py --json swapping.json --parts table-2 --models vgg16 --links 32
    python examples/benchmarks/swapping.py --json swapping.json --parts --plot docs/swapping.png

The last one plans nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import kept_figures
import torch
from budget_swapping import Point, least_within
from swapping_steps import DEVICES, MODELS, captured_network
from swapping_tables import plot, tables

from olla_solvers.baselines.caching_allocator import replay
from olla_solvers.problem import ArrayKind, Bytes
from olla_solvers.recomputation.problem import RecomputationProblem
from olla_solvers.swapping.autoswap.candidates import candidates, least_load_bytes
from olla_solvers.swapping.autoswap.planner import AutoSwap
from olla_solvers.swapping.autoswap.scores import Score
from olla_solvers.swapping.autoswap.weights import only
from olla_solvers.swapping.least_recently_used import least_recently_used
from olla_solvers.swapping.least_time import least_time_with_swaps
from olla_solvers.swapping.longest_reused import longest_reused
from olla_solvers.swapping.plan import SwapPlan
from olla_solvers.swapping.pool import blocks_of, smart_pool
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.transfers import Link

PARTS = ("table-2", "figure-8", "figure-9", "figure-11")

LINKS = (16, 32, 64)
"""GB/s each way."""

PAPER_LINK = 16
"""Of 16 lanes of PCI Express 3. SINGA's own code takes copies to run at 13.2 and 12.2 GB/s."""

FIGURE_MODEL = "vgg16"
"""Whose load and scores Figures 8 and 9 show."""

FINEST = 0.005
"""Share of the peak by which the limit falls in search of the least without extra time."""

PATIENCE = 3
"""So many limits in a row must take extra time before the search ends: it does not rise with each limit."""

SHARES = tuple(1 - 0.05 * step for step in range(1, 16))
"""Of the peak: limits of Figure 9."""

FEW_SHARES = SHARES[1::2]
"""Of the peak: limits of Figure 11."""

FIGURE_8_MB = (500, 400)
"""The limits of Figure 8, for a peak of 647 MB."""

NOTHING = 1e-9
"""A share of the step's time that is none."""

Orders: TypeAlias = Sequence[RecomputationProblem]
"""A step in one order or several."""


def table_2(step: TimedStep, link: Link, orders: Callable[[], Orders] | None = None) -> dict[str, Any]:
    """Return the least load that each method reaches without extra time, in bytes.

    Args:
        step: in eager's order.
        link: which copies.
        orders: the step in several orders, for this project's planner; None for the paper's methods alone.
    """
    planner = AutoSwap.of(step, link)
    least_bytes: dict[str, int] = {}
    for score in Score:
        weights = only(score)
        least_bytes[score] = least_without_extra(step, partial(planner.plan, weights=weights))
    # Where a score alone adds nothing the combination adds nothing; beyond that it is searched for.
    best = min(least_bytes.values())
    least_bytes["combined"] = least_without_extra(step, planner.tuned_plan, best)
    least_bytes["least-recently-used"] = least_without_extra(
        step, lambda limit: least_recently_used(step, limit, link)
    )
    least_bytes["longest-reused"] = least_without_extra(step, lambda limit: longest_reused(step, limit, link))
    if orders is not None:
        least_bytes["joint"] = least_by_ours(step, orders(), link)
    return {
        "load": least_bytes,
        "peak": step.peak_bytes,
        "least": least_load_bytes(step),
        "seconds": sum(step.seconds),
        "candidates": len(planner.gaps),
    }


def least_by_ours(step: TimedStep, problems: Orders, link: Link) -> Bytes:
    """Return the smallest load that ours reaches without extra time."""
    # Ours does not count what the step hands to the caller: the loss, or the model's results.
    outputs = (array.size_bytes for array in step.problem.arrays if array.kind is ArrayKind.OUTPUT)
    output_bytes = sum(outputs)

    def plan(limit_bytes: Bytes) -> Point:
        answer = least_time_with_swaps(problems, limit_bytes - output_bytes, link)
        extra = answer.extra_seconds / answer.step_seconds
        return (answer.peak_bytes + output_bytes, extra) if answer.is_met else None

    least = least_within(0.0, step.peak_bytes, plan, round(1 / FINEST), NOTHING)
    return step.peak_bytes if least is None else least


def least_without_extra(
    step: TimedStep, planner: Callable[[Bytes], SwapPlan], begin_bytes: Bytes | None = None
) -> Bytes:
    """Return the smallest peak of a method's plans that add no time, searched from a limit downwards."""
    least = step.peak_bytes if begin_bytes is None else begin_bytes
    in_vain = 0
    for limit_bytes in limits_below(least, step):
        plan = planner(limit_bytes)
        if plan.peak_bytes <= limit_bytes and plan.extra_seconds <= NOTHING * sum(step.seconds):
            least, in_vain = min(least, plan.peak_bytes), 0
        else:
            in_vain += 1
        if in_vain == PATIENCE:
            break
    return least


def limits_below(limit_bytes: int, step: TimedStep) -> Iterator[int]:
    """Yield limits that fall to the least load of candidates."""
    distance = int(FINEST * step.peak_bytes)
    return iter(range(limit_bytes - distance, least_load_bytes(step), -distance))


def figure_8(step: TimedStep, link: Link) -> dict[str, Any]:
    """Return loads over time: plain, within limits, and with all candidates away as long as they can be."""
    planner = AutoSwap.of(step, link)
    loads = {"original": step.load_bytes.tolist()}
    for limit_mb in FIGURE_8_MB:
        plan = planner.tuned_plan(int(limit_mb / 647 * step.peak_bytes))
        loads[f"limit {limit_mb / 647:.0%}"] = list(plan.load_bytes)
    loads["load_min"] = step.load_without(candidates(step)).tolist()
    return {"loads": loads, "ends": step.begins[1 : step.length + 1].tolist()}


def figure_9(step: TimedStep, link: Link) -> list[list[Any]]:
    """Return the extra time of each score and of their combination, for some limits, as shares."""
    planner = AutoSwap.of(step, link)
    rows = []
    for share in SHARES:
        limit_bytes = int(share * step.peak_bytes)
        if limit_bytes < least_load_bytes(step):
            break
        plans = {score.value: planner.plan(limit_bytes, only(score)) for score in Score}
        plans["combined"] = planner.tuned_plan(limit_bytes)
        seconds = sum(step.seconds)
        rows.append([share, {name: plan.extra_seconds / seconds for name, plan in plans.items()}])
    return rows


def figure_11(step: TimedStep, link: Link) -> dict[str, Any]:
    """Return all methods' footprints by SmartPool, and extra time; and the caching allocator's footprint."""
    planner = AutoSwap.of(step, link)
    methods = {
        "combined": planner.tuned_plan,
        "least-recently-used": lambda limit: least_recently_used(step, limit, link),
        "longest-reused": lambda limit: longest_reused(step, limit, link),
    }
    rows: dict[str, list[list[float]]] = {name: [] for name in methods}
    for share in FEW_SHARES:
        limit_bytes = int(share * step.peak_bytes)
        for name, method in methods.items():
            plan = method(limit_bytes)
            if plan.peak_bytes <= limit_bytes:
                footprint = smart_pool(step, plan.transfers).height_bytes
                rows[name].append([share, footprint, plan.extra_seconds / sum(step.seconds)])
    spans = [block[0] for block in blocks_of(step)]
    tops = (offset + span.size_bytes for offset, span in zip(replay(spans), spans, strict=True))
    return {"rows": rows, "caching": max(tops), "pool": smart_pool(step).height_bytes}


MAKERS: dict[str, Callable[..., Any]] = {
    "table-2": table_2,
    "figure-8": figure_8,
    "figure-9": figure_9,
    "figure-11": figure_11,
}


def is_shown(part: str, model: str, device: str, link: int) -> bool:
    """Return True if a part has figures of a model on a device with a link."""
    if part == "table-2":
        return device != "as-measured" or link == PAPER_LINK
    is_paper_s = device == DEVICES[0] and link == PAPER_LINK
    return is_paper_s and (part == "figure-11" or model == FIGURE_MODEL)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=DEVICES, metavar="NAME")
    parser.add_argument("--links", nargs="+", type=int, default=LINKS, metavar="GB/S")
    kept_figures.add_options(parser)
    return parser.parse_args()


def main() -> int:
    """Plan what the command line asks for, and show all that is known."""
    options = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    results = kept_figures.read(options.json)
    for model in options.models if options.parts else ():
        network = captured_network(model)
        for device in options.devices:
            step = network.on(device)
            for link in options.links:
                parts = [part for part in options.parts if is_shown(part, model, device, link)]
                for part in parts:
                    began = time.process_time()
                    orders = (partial(network.orders_on, device),) if part == "table-2" else ()
                    figures = MAKERS[part](step, Link(link * 1e9, link * 1e9), *orders)
                    results.setdefault(part, {})[f"{model} {device} {link}"] = figures
                    print(part, model, device, link, f"{time.process_time() - began:.1f} s", file=sys.stderr)
                    kept_figures.keep(options.json, results)
    print(tables(results))
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
