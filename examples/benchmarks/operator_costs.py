"""Compares the estimated seconds of training steps' operators with measured ones, on this CPU.

Each model has a process of its own, with one thread, so that processor time is what operators take. Every
kind of operator that can run on its own is measured (``olla_fx/costs/measuring.py``), and the planned step
itself is timed, in which the operators read what earlier ones have left in the caches.

    python examples/benchmarks/operator_costs.py --json costs.json
    python examples/benchmarks/operator_costs.py --models torchvision:resnet50 --batch-sizes 4 --operators 10

In the table, *measured* and *estimated* are sums over the step's operators, beside the settled *step*.
*Ranks* is Spearman's correlation of the kinds' seconds. *Off* is the sum of the differences' magnitudes, as a
share of what was measured: of the estimates, and of those that are corrected by the other kinds of the
operator, as in plans. The operators below are those that contribute most to it.
"""

from __future__ import annotations

import argparse
import collections
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
import numpy as np
import torch
from ordering import table
from processes import run_apart

import olla_fx
from olla_fx.capture import Mode, StepRequest
from olla_fx.compile import compile_step
from olla_fx.compiled import CompileRequest
from olla_fx.costs import Measurements, measure_kinds, operator_seconds
from olla_fx.costs.kinds import kind_of, operator_name
from olla_fx.dataflow import Dataflow
from olla_fx.models import build_model, optimizer_by_name
from olla_fx.options import Options

MODELS = ("torchvision:resnet18", "torchvision:mobilenet_v2", "torchvision:vit_b_16", "transformers:gpt2")
BATCHES = (8, 8, 2, 8)
TOKENS = 128
SETTLING = 3
TIMED = 5
UNLIMITED = 600.0
OPTIONS = {"rewrites": "none", "recompute": 0.0}


def dataflow_of(name: str, batch: int) -> Dataflow:
    """Capture a model's step under fake tensors."""
    case = build_model(name, batch_size=batch, tokens=TOKENS, device="meta")
    optimizer = optimizer_by_name("sgd", case.model.parameters())
    request = StepRequest(case.model, case.inputs, Mode.TRAINING, case.loss_fn, optimizer, Options(**OPTIONS))
    step, _ = compile_step(CompileRequest(request, runs=False))
    return step.dataflow


def step_seconds(name: str, batch: int) -> float:
    """Return the processor time of a settled planned step; the median of some."""
    case = build_model(name, batch_size=batch, tokens=TOKENS)
    optimizer = optimizer_by_name("sgd", case.model.parameters())
    step = olla_fx.optimize(case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, **OPTIONS)
    run = functools.partial(step, *case.inputs)
    for _ in range(SETTLING):
        run()
    times = []
    for _ in range(TIMED):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return statistics.median(times)


def measure(name: str, batch: int) -> dict[str, Any]:
    """Return the figures of one model's step."""
    dataflow = dataflow_of(name, batch)
    known = measure_kinds(dataflow, {}, UNLIMITED)
    kinds = [kind_of(node) for node in dataflow.operators]
    names = [operator_name(node) for node in dataflow.operators]
    estimated = dict(zip(kinds, operator_seconds(dataflow, measurements={}).seconds, strict=True))
    calibrated = {kind: _calibrated(dataflow, known, kinds, kind) for kind in known}
    counts = collections.Counter(kind for kind in kinds if kind in known)
    operators: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for kind, operator in zip(kinds, names, strict=True):
        if kind in known:
            pair = estimated[kind], known[kind].seconds
            for position, seconds in enumerate((*pair, abs(pair[0] - pair[1]))):
                operators[operator][position] += seconds
    measured_seconds = sum(known[kind].seconds * count for kind, count in counts.items())
    return {
        "operators": len(kinds),
        "kinds": len(set(kinds)),
        "measured_kinds": len(known),
        "measured_seconds": measured_seconds,
        "estimated_seconds": sum(estimated[kind] * count for kind, count in counts.items()),
        "step_seconds": step_seconds(name, batch),
        "ranks": _ranks([estimated[kind] for kind in known], [known[kind].seconds for kind in known]),
        "off": _off(known, counts, estimated) / measured_seconds,
        "off_calibrated": _off(known, counts, calibrated) / measured_seconds,
        "by_operator": dict(operators),
    }


def _calibrated(dataflow: Dataflow, known: Measurements, kinds: Sequence[str], left_out: str) -> float:
    """Return the seconds that a plan takes a kind to need if all others were measured."""
    others = {kind: measured for kind, measured in known.items() if kind != left_out}
    return operator_seconds(dataflow, measurements=others).seconds[kinds.index(left_out)]


def _off(known: Measurements, counts: dict[str, int], seconds: dict[str, float]) -> float:
    return sum(abs(seconds[kind] - known[kind].seconds) * count for kind, count in counts.items())


def _ranks(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table."""
    name = f"{row['model']} {row['batch']}"
    if "error" in row:
        return name, *("-" for _ in range(7)), row["error"][:70]
    milliseconds = (row[f"{key}_seconds"] * 1e3 for key in ("step", "measured", "estimated"))
    return (
        name,
        f"{row['operators']:,}",
        f"{row['measured_kinds']:,} of {row['kinds']:,}",
        *(f"{value:,.1f}" for value in milliseconds),
        f"{row['estimated_seconds'] / row['measured_seconds']:.2f}",
        f"{row['ranks']:.2f}",
        f"{row['off']:.0%}, {row['off_calibrated']:.0%}",
    )


def lines_of_operators(row: dict[str, Any], count: int) -> list[tuple[str, ...]]:
    """Return the operators whose estimates are farthest from what was measured."""
    farthest = sorted(row["by_operator"].items(), key=lambda item: -item[1][2])[:count]
    return [
        (
            f"{row['model']} {row['batch']}", operator, f"{measured * 1e3:,.1f}", f"{estimated * 1e3:,.1f}",
            f"{off / row['measured_seconds']:.1%}",
        )
        for operator, (estimated, measured, off) in farthest
    ]  # fmt: skip


def main() -> int:
    """Compare what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, metavar="N", help="one for each model")
    parser.add_argument("--operators", type=int, default=5, metavar="N", help="show so many of each model")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    batches = options.batch_sizes or (BATCHES if options.models is MODELS else [8] * len(options.models))
    if len(batches) != len(options.models):
        parser.error("--batch-sizes takes one number for each model")
    if options.one:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=UserWarning)
        print(json.dumps(measure(options.models[0], batches[0])))
        return 0
    rows = []
    for name, batch in zip(options.models, batches, strict=True):
        command = [sys.executable, __file__, "--one", "--models", name, "--batch-sizes", str(batch)]
        rows.append(
            {"model": name, "batch": batch, **run_apart(command, environment={"OLLA_FX_CACHE_DIR": ""})}
        )
        print(*line(rows[-1]), file=sys.stderr)
        kept_figures.keep(options.json, rows)
    header = ("step", "operators", "kinds measured", "step, ms", "measured, ms", "estimated, ms", "ratio",
              "ranks", "off: estimated, calibrated")  # fmt: skip
    print(table(header, [line(row) for row in rows]))
    done = [row for row in rows if "error" not in row]
    worst = [item for row in done for item in lines_of_operators(row, options.operators)]
    print(table(("step", "operator", "measured, ms", "estimated, ms", "off"), worst))
    return 0 if len(done) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
