"""Measures the memory that a user can measure: how much a training process grows, in eager and planned.

    python examples/benchmarks/process_memory.py
    python examples/benchmarks/process_memory.py --cases U-Net "small GPT" --settings returned kept
    python examples/benchmarks/process_memory.py --device cuda --json memory.json

Every case runs in up to four ways, each in a process of its own: in eager, in the caller's own loop around
``olla_fx.optimize(model, x)``, as a planned whole step, and by ``torch.compile(model, backend="olla_fx")``.
Figures are MiB by which the process has grown over the *loaded model*: torch and olla_fx are imported,
models, optimizers and inputs are made, and nothing has run. What planning needs and leaves is growth, too.

* *peak* is the most that the process ever had, *steady* what it has after the calls; for the first calls, in
  which a plan is made and settled, and for the later ones.
* *live* is the most bytes alive at once in a step, recorded from the allocator after the measurement: eager's
  requests; or planned buffers, and the requests beside them. *reported* is what ``report()`` calls buffer and
  outputs, of all planned modules together.
* *optimize* is the growth at the return of ``optimize()``, before the first call. *loop* are the seconds of
  planning and all calls, *step* those of a later call.

There are two settings. ``returned``: the C library returns what is freed to the system at once
(``MALLOC_MMAP_THRESHOLD_`` gives each larger block pages of its own, ``MALLOC_TRIM_THRESHOLD_`` cuts free
pages off the heap's end, ``MALLOC_ARENA_MAX=1`` keeps one heap), so that growth is what is in use. ``kept``:
as it comes; glibc moves these limits as it runs, and keeps much of what is freed. On CUDA they are
``max_memory_allocated`` and ``max_memory_reserved``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kept_figures
import torch
from memory_cases.cases import CASES
from memory_cases.measure import FIRST_CALLS, LATER_CALLS, WAYS, measure
from processes import run_apart
from stopwatch import load_search

from olla_fx import arena

MIB = 1 << 20
LIMIT_BYTES = 64 << 10
SETTINGS: dict[str, dict[str, str | None]] = {
    "returned": {
        "MALLOC_MMAP_THRESHOLD_": str(LIMIT_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(LIMIT_BYTES),
        "MALLOC_ARENA_MAX": "1",
    },
    "kept": {
        "MALLOC_MMAP_THRESHOLD_": None, "MALLOC_TRIM_THRESHOLD_": None, "MALLOC_ARENA_MAX": None,
    },
}  # fmt: skip
"""Setting → the C library's environment."""

GROWTHS = ("first_peak", "first_steady", "later_peak", "later_steady")
COMPARED = ("own loop", "whole step", "torch.compile")
QUICK_CASES = ("LSTM",)
QUICK_CALLS = (3, 2)

Row = dict[str, Any]


def main() -> int:
    """Measure what the command line asks for; return 1 if anything failed."""
    options = _parser().parse_args()
    calls = QUICK_CALLS if options.quick else (FIRST_CALLS, LATER_CALLS)
    if options.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(options.threads)
        returned = options.settings[0] == "returned"
        figures = measure(
            options.cases[0], options.ways[0], device=options.device, returned=returned, calls=calls
        )
        print(json.dumps(figures))
        return 0
    # Compiled here, once for the machine, and not in what is measured.
    arena.available(torch.device(options.device))
    if not options.quick:
        load_search()
    rows: list[Row] = []
    for setting in options.settings:
        for case in options.cases or (QUICK_CASES if options.quick else CASES):
            for way in options.ways:
                started = time.perf_counter()
                row = measure_apart(case, way, setting, options)
                if row is None:
                    continue
                rows.append(row)
                words = row.get("error", f"{time.perf_counter() - started:.0f} s")
                print(f"{setting}, {case}, {way}: {words}", file=sys.stderr, flush=True)
                kept_figures.keep(options.json, rows)
    for setting in options.settings:
        print(f"\nMemory {setting}, {options.device}, MiB over the loaded model; (planned / eager)\n")
        print(table([row for row in rows if row["setting"] == setting]))
        print(f"\n{summary([row for row in rows if row['setting'] == setting])}")
    return 1 if any("error" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["returned"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch's kernels on the CPU")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--quick", action="store_true", help="a small case, few calls")
    parser.add_argument("--json", type=Path, help="write the figures here, too; bytes and seconds")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser


def measure_apart(case: str, way: str, setting: str, options: argparse.Namespace) -> Row | None:
    """Measure in a process of its own, which keeps no plans on disk; None if the case has no such way."""
    command = [sys.executable, __file__, "--one", "--cases", case, "--ways", way, "--settings", setting]
    command += ["--device", options.device, "--threads", str(options.threads)]
    figures = run_apart(
        [*command, "--quick"] if options.quick else command,
        environment={**SETTINGS[setting], "OLLA_FX_CACHE_DIR": ""},
        time_limit=options.patience,
    )
    return {"setting": setting, "case": case, "way": way, **figures} if figures else None


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown, each planned growth with its ratio to eager's."""
    header = (
        "case", "way", "first peak", "first steady", "later peak", "later steady", "live", "reported",
        "optimize", "loop s", "step s",
    )  # fmt: skip
    lines = [header, ("---",) * len(header)]
    eager = {row["case"]: row for row in rows if row["way"] == "eager" and "error" not in row}
    for row in rows:
        name = row["case"], row["way"]
        if "error" in row:
            lines.append((*name, row["error"][:100].replace("|", "\\|"), *[""] * (len(header) - 3)))
            continue
        beside = {} if row["way"] == "eager" else eager.get(row["case"], {})
        sizes = [_size(row, column, beside) for column in (*GROWTHS, "live", "reported", "planning")]
        lines.append((*name, *sizes, _seconds(row, "seconds", beside), _seconds(row, "step_seconds", beside)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(row: Row, column: str, beside: Mapping[str, float]) -> str:
    if column not in row:
        return "-"
    size = f"{row[column] / MIB:,.1f}"
    compared = (*GROWTHS, "live")
    return f"{size} ({row[column] / beside[column]:.2f})" if column in compared and beside else size


def _seconds(row: Row, column: str, beside: Mapping[str, float]) -> str:
    seconds = f"{row[column]:.2f}"
    return f"{seconds} ({row[column] / beside[column]:.2f})" if beside else seconds


def summary(rows: Sequence[Row]) -> str:
    """Return the median and the largest ratio to eager's over the cases, of every way, in Markdown."""
    columns = (*GROWTHS, "live", "seconds", "step_seconds")
    measured = [row for row in rows if "error" not in row]
    eager = {row["case"]: row for row in measured if row["way"] == "eager"}
    lines = [
        "| planned / eager: median, largest (its case) | " + " | ".join(COMPARED) + " |",
        "|---" * (len(COMPARED) + 1) + "|",
    ]
    for column in columns:
        cells = []
        for way in COMPARED:
            ratios = {
                row["case"]: row[column] / eager[row["case"]][column]
                for row in measured
                if row["way"] == way and row["case"] in eager
            }
            worst = max(ratios, key=lambda case: ratios[case], default="")
            cells.append(
                f"{statistics.median(ratios.values()):.2f}, {ratios[worst]:.2f} ({worst})" if ratios else "-"
            )
        lines.append(f"| {column.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
