"""``olla-fx plan``: plans a model's step. Nothing is run: the model is built on the meta device."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from olla_fx import models
from olla_fx.api import plan as plan_step
from olla_fx.cli.common import UsageError, check_folders, count, report
from olla_fx.costs import PROFILES
from olla_fx.rewrites import REWRITES
from olla_fx.step_plan import Plan

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what ``plan`` takes besides solver, time limit and ``--json``."""
    command.add_argument("--model", required=True, metavar="NAME", help=" | ".join(models.FAMILIES))
    command.add_argument("--batch-size", type=count, default=1, metavar="N")
    command.add_argument("--image-size", type=count, metavar="N", help="height and width of images")
    command.add_argument("--tokens", type=count, default=models.TOKENS, metavar="N", help="length of text")
    _add_kind(command)
    command.add_argument("--optimizer", default="sgd", metavar="NAME", help=" | ".join(models.OPTIMIZERS))
    command.add_argument(
        "--rewrites",
        nargs="+",
        default=["all"],
        choices=["all", "none", *REWRITES],
        metavar="NAME",
        help=f"what may be rewritten so that backward keeps less: all | none | {' | '.join(REWRITES)}",
    )
    _add_recomputation(command)
    command.add_argument(
        "--loss-chunks",
        type=count,
        metavar="N",
        help="compute the last layer and its cross entropy in N chunks if that lowers the peak",
    )
    command.add_argument("--no-baseline", action="store_true", help="do not ask what eager would need")
    command.add_argument("--plot", metavar="FILE", help="draw the plan into a .png, .svg or .pdf file")


def _add_kind(command: argparse.ArgumentParser) -> None:
    """Add what tells which kind of step is planned."""
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--train",
        dest="kind",
        action="store_const",
        const="train",
        default="train",
        help="a whole training step (default)",
    )
    kind.add_argument(
        "--own-loop",
        dest="kind",
        action="store_const",
        const="own-loop",
        help="forward and backward, in a training loop of one's own",
    )
    kind.add_argument(
        "--inference", dest="kind", action="store_const", const="inference", help="the forward pass alone"
    )


def _add_recomputation(command: argparse.ArgumentParser) -> None:
    """Add what may take time so that less is kept: computing again, and copies to the host and back."""
    command.add_argument(
        "--recompute",
        type=float,
        metavar="SHARE",
        help="of the step's time that backward may spend on computing again what would be kept (0.01)",
    )
    command.add_argument(
        "--memory-budget",
        metavar="BYTES",
        help="what the step may need beside static arrays: 8GiB, or 0.6 or 60%% of what it needs without; "
        "backward computes again what that takes",
    )
    command.add_argument(
        "--memory-budget-includes",
        choices=["static"],
        metavar="WHAT",
        help="static: parameters, state and inputs count in the budget, too",
    )
    command.add_argument(
        "--link",
        metavar="SPEED",
        help="with --memory-budget: how fast arrays are copied to the host and back, such as 16GB/s; they "
        "wait there where that takes less time than to compute them again",
    )
    command.add_argument(
        "--device-profile",
        choices=PROFILES,
        metavar="NAME",
        help=f"a device that is not here, whose time counts for recomputation: {' | '.join(PROFILES)}",
    )


def run(parsed: argparse.Namespace) -> None:
    """Plan the step of a model.

    Args:
        parsed: the command line.
    """
    check_folders(parsed.json, parsed.plot)
    if parsed.plot and Path(parsed.plot).suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {parsed.plot}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    if parsed.kind == "inference" and parsed.recompute is not None:
        raise UsageError("--recompute is for backward, which --inference has none of: leave one of them out")
    case = models.build_model(
        parsed.model,
        batch_size=parsed.batch_size,
        image_size=parsed.image_size,
        tokens=parsed.tokens,
        train=parsed.kind != "inference",
        device="meta",
    )
    optimizer = models.optimizer_by_name(parsed.optimizer, case.model.parameters())
    in_own_loop, whole_step = parsed.kind == "own-loop", parsed.kind == "train"
    plan = plan_step(
        case.model,
        case.inputs[:-1] if in_own_loop else case.inputs,
        loss_fn=case.loss_fn if whole_step else None,
        optimizer=optimizer if whole_step else None,
        solver=parsed.solver,
        time_limit=parsed.time_limit,
        baseline=not parsed.no_baseline,
        rewrites=_rewrites(parsed.rewrites),
        recompute=parsed.recompute,
        memory_budget=parsed.memory_budget,
        link=parsed.link,
        memory_budget_includes=parsed.memory_budget_includes,
        device_profile=parsed.device_profile,
        loss_chunks=parsed.loss_chunks,
    )
    report(plan.report(), _document(plan, parsed.solver), parsed.json)
    if parsed.plot:
        plan.plot(parsed.plot)


def _rewrites(names: list[str]) -> str | list[str]:
    """Return the option that some names on the command line stand for.

    Raises:
        UsageError: if ``all`` or ``none`` stands among others.
    """
    if len(names) == 1:
        return names[0]
    if {"all", "none"} & set(names):
        raise UsageError(f"--rewrites {' '.join(names)}: all and none stand alone")
    return names


def _document(plan: Plan, solver: str) -> dict[str, Any]:
    return {
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "is_optimal": plan.is_optimal,
        "buffer_bytes": plan.buffer_bytes,
        "fragmentation": plan.fragmentation,
        "static_bytes": plan.static_bytes,
        "gradient_bytes": plan.gradient_bytes,
        "output_bytes": plan.output_bytes,
        "total_bytes": plan.total_bytes,
        "seconds": dict(plan.timings),
        "solver": solver,
        "largest": [dataclasses.asdict(array) for array in plan.largest],
        "memory_budget_bytes": plan.memory_budget_bytes,
        "needed_bytes": plan.needed_bytes,
        "extra_time": plan.extra_time,
        "extra_time_bound": plan.extra_time_bound,
        "recomputed": plan.recomputed.to_json(),
        "swapped": plan.swapped.to_json(),
        "host_bytes": plan.host_bytes,
        "changes": [dataclasses.asdict(change) for change in plan.changes],
        "provenance": dataclasses.asdict(plan.provenance),
        "baseline": None if plan.baseline is None else plan.baseline.to_json(),
        "order": list(plan.order),
        "offsets": dict(plan.offsets),
        "host_offsets": dict(plan.memory.host_offsets),
        "problem": plan.problem.to_json(),
    }
