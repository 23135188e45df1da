"""Plans training steps with and without rewrites, and says what each of these is worth.

Steps are captured under fake tensors with SGD, so that no batch needs memory; kernels' workspaces are not
counted. Every step is planned in a process of its own, which keeps no plans on disk. ``none`` is the plan of
the captured graph, ``all`` that with every rewrite that pays; ``--alone`` adds one with each rewrite alone.
``--recompute`` adds plans that may take so much more of the step's time, as it is estimated for ``--device``.

    python examples/benchmarks/rewrites.py --json rewrites.json
    python examples/benchmarks/rewrites.py --models torchvision:resnet50 --batch-sizes 32 --alone
    python examples/benchmarks/rewrites.py --recompute 0.01 0.03 0.1 --device a100
    python examples/benchmarks/rewrites.py --models torchvision:resnet18 --batch-sizes 8 --pairs 12

With ``--inductor`` the same step's peak by ``torch.compile``'s estimate stands beside
(``inductor_memory.py``), with its default settings and with ``activation_memory_budget=0.5``.

With ``--pairs`` real steps of both plans (the second one with the largest share of ``--recompute``, on this
device) are timed as well, one right after the other, in processor time of one thread, and the median of their
ratios is printed.

A saving is against what eager reserves (model of the caching allocator), with the static arrays on both
sides; in brackets without. The exit status is 1 if a step needs more with rewrites than without, or fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kept_figures
import torch
from ordering import MODELS, SMALLEST_BATCH, TOKENS, table
from processes import run_apart
from stopwatch import paired

import olla_fx
from olla_fx.models import build_model, optimizer_by_name

MIB = 1 << 20
HEADER = (
    "step", "static", "live", "reserved", "none: peak", "all: peak", "buffer", "recompute", "proven",
    "none: s", "all: s", "step's time", "inductor", "inductor 0.5", "rewrites",
)  # fmt: skip

INDUCTOR_BUDGETS = (1.0, 0.5)
INDUCTOR_SECONDS = 900.0
SETTLING = 3
"""Calls until a plan is settled."""


def measure(name: str, batch: int, alone: bool, shares: Sequence[float], device: str) -> dict[str, Any]:
    """Plan one model's step in this process, with several choices of rewrites and of recomputation."""
    choices = {"none": ("none", 0.0), "all": ("all", 0.0)}
    choices |= {rewrite: (rewrite, 0.0) for rewrite in olla_fx.REWRITES} if alone else {}
    choices |= {f"{100 * share:g}%": ("all", share) for share in shares}
    plans: dict[str, Any] = {}
    result: dict[str, Any] = {"plans": plans}
    for label, (rewrites, share) in choices.items():
        case = build_model(name, batch_size=batch, tokens=TOKENS, device="meta")
        optimizer = optimizer_by_name("sgd", case.model.parameters())
        began = time.process_time()
        plan = olla_fx.plan(
            case.model,
            case.inputs,
            loss_fn=case.loss_fn,
            optimizer=optimizer,
            baseline=False,
            rewrites=rewrites,
            recompute=share,
            device_profile=device,
        )
        plans[label] = {
            "seconds": time.process_time() - began,
            "peak_bytes": plan.peak_bytes,
            "lower_bound_bytes": plan.lower_bound_bytes,
            "buffer_bytes": plan.buffer_bytes,
            "operators": len(plan.order),
            "stages": dict(plan.timings),
            "extra_time": plan.extra_time,
            "changes": [[change.rewrite, change.operator, change.saved_bytes] for change in plan.changes],
        }
    eager = olla_fx.plan(
        case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, rewrites="none", recompute=0
    )
    if eager.baseline is None:
        raise RuntimeError("the plan has no baseline")
    return {
        **result,
        "static_bytes": eager.static_bytes + eager.output_bytes,
        "live_bytes": eager.baseline.live_peak_bytes,
        "reserved_bytes": eager.baseline.reserved_bytes,
    }


def time_ratio(name: str, batch: int, pairs: int, share: float) -> float:
    """Return how long a rewritten step takes beside one that is not; the median of some pairs."""
    torch.set_num_threads(1)
    steps = []
    for rewrites, recompute in (("none", 0.0), ("all", share)):
        case = build_model(name, batch_size=batch, tokens=TOKENS)
        optimizer = optimizer_by_name("sgd", case.model.parameters())
        step = olla_fx.optimize(
            case.model,
            case.inputs,
            loss_fn=case.loss_fn,
            optimizer=optimizer,
            rewrites=rewrites,
            recompute=recompute,
        )
        steps.append(functools.partial(step, *case.inputs))
        for _ in range(SETTLING):
            steps[-1]()
    plain, rewritten = steps
    times = [paired(plain, rewritten, bool(pair % 2), time.process_time) for pair in range(pairs)]
    return statistics.median(later / earlier for earlier, later in times)


def measure_apart(name: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Plan one model's step in a process of its own; what went wrong is under ``error``."""
    command = [sys.executable, __file__, "--one", "--models", name, "--batch-sizes", str(batch)]
    command += ["--pairs", str(options.pairs), *(["--alone"] if options.alone else [])]
    command += ["--device", options.device, "--recompute", *map(str, options.recompute)]
    return {"model": name, "batch": batch, **run_apart(command, environment={"OLLA_FX_CACHE_DIR": ""})}


def inductor_apart(name: str, batch: int) -> dict[str, Any]:
    """Return what inductor says a step needs for each of its memory budgets; the larger of both graphs."""
    peaks: dict[str, Any] = {}
    for budget in INDUCTOR_BUDGETS:
        script = Path(__file__).with_name("inductor_memory.py")
        command = [sys.executable, str(script), name, "--batch-size", str(batch), "--budget", str(budget)]
        answer = run_apart(command, time_limit=INDUCTOR_SECONDS)
        peaks[str(budget)] = answer.get("error") or max(answer.values())
    return {"inductor": peaks}


def saving(row: dict[str, Any], label: str, *, static: bool) -> float:
    """Return the share of eager's reserved bytes that a plan saves."""
    beside = row["static_bytes"] if static else 0
    return 1 - (beside + row["plans"][label]["buffer_bytes"]) / (beside + row["reserved_bytes"])


def in_mib(size: object) -> str:
    """Return bytes in MiB; a dash for what is not known."""
    return f"{size / MIB:,.0f}" if isinstance(size, int) else "-"


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table; bytes in MiB."""
    name = f"{row['model']} {row['batch']}"
    if "error" in row:
        return name, *("-" for _ in range(13)), row["error"][:70]
    plans = row["plans"]
    shares = " ".join(in_mib(plan["buffer_bytes"]) for label, plan in plans.items() if "%" in label)
    sizes = [row[f"{key}_bytes"] for key in ("static", "live", "reserved")]
    sizes += [plans["none"]["peak_bytes"], plans["all"]["peak_bytes"], plans["all"]["buffer_bytes"]]
    proven = all(plan["peak_bytes"] == plan["lower_bound_bytes"] for plan in plans.values())
    return (
        name,
        *(f"{size / MIB:,.0f}" for size in sizes),
        shares or "-",
        "yes" if proven else "no",
        *(f"{plans[label]['seconds']:.1f}" for label in ("none", "all")),
        f"{row['time']:.3f}" if "time" in row else "-",
        *(in_mib(row.get("inductor", {}).get(str(budget))) for budget in INDUCTOR_BUDGETS),
        ", ".join(dict.fromkeys(change[0] for change in plans["all"]["changes"])),
    )


def summary(rows: list[dict[str, Any]], batch: int) -> str:
    """Return the mean savings of the steps of a batch size, one line for each choice."""
    labels = rows[0]["plans"]
    lines = []
    for label in labels:
        with_static, without = (
            100 * statistics.fmean(saving(row, label, static=static) for row in rows)
            for static in (True, False)
        )
        lines.append(f"batch {batch}, {label}: {with_static:.1f} % ({without:.1f} %) less than eager")
    return "\n".join(lines)


def rows_of(rows: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Return the rows of a batch size; some models need a larger one than the smallest."""
    return [row for row in rows if row["batch"] == max(batch, SMALLEST_BATCH.get(row["model"], 1))]


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what the command line asks for, and write it down as it comes."""
    rows = []
    for batch in options.batch_sizes:
        for name in options.models:
            size = max(batch, SMALLEST_BATCH.get(name, 1))
            rows.append(measure_apart(name, size, options))
            if options.inductor:
                rows[-1] |= inductor_apart(name, size)
            print(*line(rows[-1]), file=sys.stderr)
            kept_figures.keep(options.json, rows)
    return rows


def plot(rows: list[dict[str, Any]], batches: Sequence[int], path: Path) -> None:
    """Draw what each step needs, static arrays included, as a share of what eager reserves."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(batches), figsize=(6 * len(batches), 6), sharex=True, squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        of_batch = rows_of(rows, batch)
        names = [row["model"].rpartition(":")[2] for row in of_batch]
        for label in of_batch[0]["plans"]:
            shares = [1 - saving(row, label, static=True) for row in of_batch]
            axis.plot(shares, range(len(names)), "o", markersize=5, label=label)
            axis.axvline(statistics.fmean(shares), color=axis.lines[-1].get_color(), linewidth=0.8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(f"batch {batch}: bytes beside eager's reserved")
        axis.set_xlim(0, 1.02)
        axis.legend(loc="lower left", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    """Plan what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(1, 32), metavar="N")
    parser.add_argument("--alone", action="store_true", help="plan with each rewrite alone, too")
    parser.add_argument("--recompute", nargs="*", type=float, default=(), metavar="SHARE")
    parser.add_argument("--device", default="a100", help="whose time counts (default: %(default)s)")
    parser.add_argument("--inductor", action="store_true", help="ask torch.compile's estimate, too")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="time so many pairs of steps, too")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--plot", type=Path, help="draw the figures into an image file")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="show figures that were written before"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.filterwarnings("ignore", category=UserWarning)
        name, batch = options.models[0], options.batch_sizes[0]
        shares = options.recompute
        figures = measure(name, batch, options.alone, shares, options.device)
        if options.pairs:
            figures["time"] = time_ratio(name, batch, options.pairs, max(shares, default=0.0))
        print(json.dumps(figures))
        return 0
    rows = json.loads(options.from_json.read_text()) if options.from_json else measure_all(options)
    print(table(HEADER, [line(row) for row in rows]))
    planned = [row for row in rows if "error" not in row]
    for batch in options.batch_sizes:
        if of_batch := rows_of(planned, batch):
            print(summary(of_batch, batch))
    if options.plot:
        plot(planned, options.batch_sizes, options.plot)
    worse = [row for row in planned if row["plans"]["all"]["peak_bytes"] > row["plans"]["none"]["peak_bytes"]]
    return 1 if worse or len(planned) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
