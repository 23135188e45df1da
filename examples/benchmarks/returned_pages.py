"""Tries what it would bring, and cost, to return pages of a buffer that no array needs to the system.

    python examples/benchmarks/returned_pages.py --cases LSTM GAN AdamW --steps 5

In the caller's own loop the whole buffer stands while the loss, or an optimizer, needs memory of its own.
Here its idle pages are returned (``MADV_DONTNEED``) in between, and come back, filled with zeros, when an
operator writes to them, at about a quarter of a microsecond a KiB. This is a trial, on Linux: no planned
step does it. Every case runs in three processes: *none* returns nothing, *forward* what no array needs that
is alive when forward is over, *both* also what holds no gradient when backward is over. Memory is
``returned``, as in ``process_memory.py``; *peaks* are MiB over the loaded model in the first four steps and
in those after, *step* is processor time on one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import json
import os
import sys
import time
import warnings
from functools import cache
from typing import Any

import torch
from memory_cases.cases import CASES
from memory_cases.measure import FIRST_CALLS, SEED, ProcessGauge, ready, settled
from process_memory import MIB, SETTINGS
from processes import run_apart

from olla_fx.fx_graph import end_of_backward, forward_backward_boundary
from olla_fx.run.planned_run import PlannedRun
from olla_solvers.analysis import lifetimes

MOMENTS = ("none", "forward", "both")
LEAST_BYTES = 64 << 10
"""Smaller ranges are kept: each is a call of the system's."""

_MADV_DONTNEED = 4
_returned_bytes = 0


def main() -> int:
    """Measure what the command line asks for; return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", default=["LSTM"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--one", choices=MOMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(_measure(options.cases[0], options.one, options.steps)))
        return 0
    columns = ("case", "returned after", "first peak", "later peak", "returned a step", "step ms")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    failed = False
    for case in options.cases:
        for moment in MOMENTS:
            command = [sys.executable, __file__, "--one", moment, "--cases", case]
            row = run_apart(
                [*command, "--steps", str(options.steps)],
                environment={**SETTINGS["returned"], "OLLA_FX_CACHE_DIR": ""},
            )
            failed |= "error" in row
            sizes = (f"{row[key] / MIB:.1f}" for key in ("first_peak", "later_peak", "returned"))
            words = row["error"] if "error" in row else " | ".join((*sizes, f"{1e3 * row['seconds']:.0f}"))
            print(f"| {case} | {moment} | {words} |", flush=True)
    return int(failed)


def _measure(case: str, moment: str, steps: int) -> dict[str, Any]:
    global _returned_bytes
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    loop = CASES[case]()
    importlib.import_module("olla_fx.api")
    loaded = settled(ProcessGauge())
    ProcessGauge.reset()
    if moment != "none":
        _return_pages(backward_too=moment == "both")
    run = ready(loop, "own loop")
    for _ in range(FIRST_CALLS):
        run()
    first_peak, _returned_bytes = ProcessGauge.peak() - loaded, 0
    ProcessGauge.reset()
    started = time.process_time()
    for _ in range(steps):
        run()
    return {
        "seconds": (time.process_time() - started) / steps,
        "first_peak": first_peak,
        "later_peak": ProcessGauge.peak() - loaded,
        "returned": _returned_bytes / steps,
    }


def _return_pages(*, backward_too: bool) -> None:
    """Let all runs of this process return pages from now on."""
    run_phase: Any = PlannedRun.run_phase
    release: Any = PlannedRun.release

    def run_and_return(run: PlannedRun, index: int, arguments: Any, *, last: bool = True) -> Any:
        results = run_phase(run, index, arguments, last=last)
        if not index and not last and run.arena is not None:
            _return_idle(run, forward_backward_boundary)
        return results

    def return_and_release(run: PlannedRun) -> None:
        if backward_too and run.arena is not None:
            _return_idle(run, end_of_backward)
        release(run)

    PlannedRun.run_phase, PlannedRun.release = run_and_return, return_and_release  # type: ignore[method-assign]


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _return_idle(run: PlannedRun, marker: object) -> None:
    """Return the pages of a run's part of the buffer in which nothing is alive at an operator."""
    global _returned_bytes
    claim = None if run._lease is None else run._lease._claim
    operator = run.step.operator_of(marker)
    if claim is None or claim.segment is None or claim.segment.buffer is None or operator is None:
        return
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    start = claim.segment.buffer.address + claim.base
    for low, high in _idle_ranges(run.step, operator):
        first = -(-(start + low) // page_bytes) * page_bytes
        size_bytes = (start + high) // page_bytes * page_bytes - first
        if size_bytes >= LEAST_BYTES:
            if _madvise()(first, size_bytes, _MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise")
            _returned_bytes += size_bytes


def _idle_ranges(step: Any, operator: str) -> Any:
    ranges = step.__dict__.setdefault("_idle_ranges", {})
    if operator not in ranges:
        problem, plan = step.plan.problem, step.plan.memory
        at, living = plan.order.index(operator), _living(problem, plan)
        alive = sorted(
            (plan.offsets[array.name], plan.offsets[array.name] + array.size_bytes)
            for array in problem.planned
            if living[array.name].lower <= at < living[array.name].upper
        )
        bounds = [0, *itertools.chain.from_iterable(alive), plan.buffer_bytes]
        ranges[operator] = list(zip(bounds[::2], bounds[1::2], strict=True))
    return ranges[operator]


def _living(problem: Any, plan: Any) -> Any:
    return lifetimes(problem, problem.indices_of(plan.order))


if __name__ == "__main__":
    sys.exit(main())
