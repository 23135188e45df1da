"""Plans whole training steps and tabulates peak, bound, buffer, fragmentation, and the seconds of each stage.

Without ``--recorded`` the steps are captured under fake tensors, so that no batch needs memory, and kernels'
scratch memory is unknown. With it one real step is run and recorded first, and the plan contains each
operator's workspace. Every step is planned in a process of its own, which keeps no plans on disk.

    python examples/benchmarks/steps.py --recorded --batch-sizes 1 8 --json recorded.json
    python examples/benchmarks/steps.py --batch-sizes 32 --json fake.json

Wall-clock seconds are those of the plan. Ordering and placing are then repeated for their processor time,
which hardly depends on what else runs on the machine. The exit status is 1 where a step has fragmentation,
takes longer than a second of processor time to order or to place, or fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import kept_figures
from ordering import MODELS, SMALLEST_BATCH, TOKENS, table
from processes import run_apart
from stopwatch import load_search

import olla_fx
from olla_fx.models import build_model, optimizer_by_name
from olla_solvers.order import order
from olla_solvers.place import place, spans_of
from olla_solvers.place.search import compilation_so_far
from olla_solvers.problem import Problem

MIB = 1 << 20
MOST_SECONDS = 1.0
"""Of processor time, for ordering, and for placing with the compiled search loaded."""


def measure(name: str, batch: int, recorded: bool) -> dict[str, Any]:
    """Plan one model's step in this process, once the compiled search is loaded."""
    load_search()
    case = build_model(name, batch_size=batch, tokens=TOKENS, device="cpu" if recorded else "meta")
    optimizer = optimizer_by_name("sgd", case.model.parameters())
    if recorded:
        step = olla_fx.optimize(case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer)
        step(*case.inputs)
        plan = step.plan
    else:
        plan = olla_fx.plan(
            case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, baseline=False
        )
    return {
        "operators": len(plan.order),
        "workspace_bytes": max((operator.workspace_bytes for operator in plan.problem.operators), default=0),
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "buffer_bytes": plan.buffer_bytes,
        "fragmentation": plan.fragmentation,
        "order_seconds": plan.timings["order"],
        "place_seconds": plan.timings["place"],
        **processor_seconds(plan.problem),
        "load_seconds": compilation_so_far(),
        "proved_by": plan.provenance.order_proved_by,
        "placed_by": plan.provenance.place_found_by,
    }


def processor_seconds(problem: Problem) -> dict[str, float]:
    """Return the processor time of ordering and placing alone."""
    begin = time.process_time()
    schedule = order(problem)
    ordered = time.process_time()
    place(spans_of(problem, schedule.order))
    return {"order_processor": ordered - begin, "place_processor": time.process_time() - ordered}


def measure_apart(name: str, batch: int, recorded: bool) -> dict[str, Any]:
    """Plan one model's step in a process of its own; what went wrong is under ``error``."""
    command = [sys.executable, __file__, "--one", "--models", name, "--batch-sizes", str(batch)]
    result = run_apart(
        [*command, "--recorded"] if recorded else command, environment={"OLLA_FX_CACHE_DIR": ""}
    )
    return {"model": name, "batch": batch, "recorded": recorded, **result}


def meets(row: dict[str, Any]) -> bool:
    """Return True if a step has no fragmentation and was planned in time."""
    if "error" in row:
        return False
    exact = row["buffer_bytes"] == row["peak_bytes"]
    return exact and max(row["order_processor"], row["place_processor"]) <= MOST_SECONDS


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table; bytes in MiB."""
    name = f"{row['model']} {row['batch']}"
    if "error" in row:
        return name, *("-" for _ in range(10)), row["error"][:70]
    sizes = (row[f"{column}_bytes"] / MIB for column in ("workspace", "peak", "lower_bound", "buffer"))
    return (
        name,
        f"{row['operators']:,}",
        *(f"{size:,.2f}" for size in sizes),
        f"{100 * row['fragmentation']:.4f}",
        *(
            f"{row[f'{stage}_{kind}']:.2f}"
            for stage in ("order", "place")
            for kind in ("seconds", "processor")
        ),
        row["placed_by"],
    )


def main() -> int:
    """Plan what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(1, 32), metavar="N")
    parser.add_argument("--recorded", action="store_true", help="run and record a real step first")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.filterwarnings("ignore", category=UserWarning)
        print(json.dumps(measure(options.models[0], options.batch_sizes[0], options.recorded)))
        return 0
    rows = []
    for batch in options.batch_sizes:
        for name in options.models:
            size = max(batch, SMALLEST_BATCH.get(name, 1))
            rows.append(measure_apart(name, size, options.recorded))
            print(*line(rows[-1]), file=sys.stderr)
            kept_figures.keep(options.json, rows)
    header = ("step", "operators", "largest workspace", "peak", "lower bound", "buffer", "fragmentation %",
              "order s", "of processor time", "place s", "of processor time", "placed by")  # fmt: skip
    print(table(header, [line(row) for row in rows]))
    missed = [row for row in rows if not meets(row)]
    print(
        f"{len(rows) - len(missed)} of {len(rows)} without fragmentation, "
        f"each stage within {MOST_SECONDS:g} s of processor time"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
