"""Measures one case in one way in this process: the growth of the process, and the allocator's live bytes.

On a CPU the process's memory is read as the kernel counts it: pages resident now from ``/proc/self/statm``,
the most since the last reset from ``VmHWM``; writing 5 to ``/proc/self/clear_refs`` resets that. On CUDA
PyTorch's allocator counts: reserved bytes if memory is kept as it comes, allocated ones if it is returned.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import olla_fx
from olla_fx.arena import Buffer, record_events
from olla_fx.eager.baseline import baseline_from_events

from .cases import CASES, Loop, Run

WAYS = ("eager", "own loop", "whole step", "torch.compile")

FIRST_CALLS = 4
"""Calls until a plan is settled: the first one is recorded, a later one may be planned again."""

LATER_CALLS = 8
SEED = 0

Kind = TypeVar("Kind")


class ProcessGauge:
    """Reads this process's resident memory."""

    @staticmethod
    def now() -> int:
        """Return the resident bytes."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @staticmethod
    def peak() -> int:
        """Return the most resident bytes since the last reset."""
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

    @staticmethod
    def reset() -> None:
        """Let the peak start from the present."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@dataclass(frozen=True)
class CudaGauge:
    """Reads the bytes of the CUDA caching allocator.

    Attributes:
        reserved: True for reserved bytes, False for allocated ones.
    """

    reserved: bool

    def now(self) -> int:
        """Return the present bytes."""
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved() if self.reserved else torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most since the last reset."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() if self.reserved else torch.cuda.max_memory_allocated()

    @staticmethod
    def reset() -> None:
        """Let the peak start from the present."""
        torch.cuda.reset_peak_memory_stats()


def measure(case: str, way: str, *, device: str, returned: bool, calls: tuple[int, int]) -> dict[str, Any]:
    """Run a case in one way.

    Args:
        case: one of :data:`CASES`.
        way: one of :data:`WAYS`.
        device: ``cpu`` or ``cuda``.
        returned: True if freed memory counts as returned; on a CPU the environment has settled that.
        calls: how many first and how many later calls.

    Returns:
        Growths over the loaded model, in bytes, the seconds of the loop, and what plans and the allocator
        say; empty if the case cannot run this way.
    """
    torch.manual_seed(SEED)
    # While building only: a default device is a mode, and Dynamo splits graphs under it.
    with torch.device(device):
        loop = CASES[case]()
    if way == "whole step" and loop.whole is None:
        return {}
    gauge = CudaGauge(not returned) if device == "cuda" else ProcessGauge()
    # olla_fx imports its stages on first use; what is loaded includes them.
    importlib.import_module("olla_fx.api")
    loaded = settled(gauge)
    gauge.reset()
    started = time.perf_counter()
    run = ready(loop, way)
    row: dict[str, Any] = {"loaded": loaded, "planning": gauge.now() - loaded}
    seconds = time.perf_counter() - started
    for phase, count in zip(("first", "later"), calls, strict=True):
        started = time.perf_counter()
        for _ in range(count):
            run()
        phase_seconds = time.perf_counter() - started
        row[f"{phase}_peak"] = gauge.peak() - loaded
        row[f"{phase}_steady"] = settled(gauge) - loaded
        gauge.reset()
        seconds += phase_seconds
    return row | {
        "seconds": seconds,
        "step_seconds": phase_seconds / calls[1],
        # Last, since recording takes memory itself.
        "live": row["later_peak"] if device == "cuda" else live_peak_bytes(run),
        **planned_figures(),
    }


def settled(gauge: ProcessGauge | CudaGauge) -> int:
    """Return the present bytes without garbage."""
    gc.collect()
    return gauge.now()


def ready(loop: Loop, way: str) -> Run:
    """Plan a loop in one of the ways, and return what runs a step of it."""
    if way == "whole step":
        if loop.whole is None:
            raise ValueError("this loop has no whole step")
        return loop.whole()
    called: list[Callable[..., Any]] = [model for model, _ in loop.models]
    if way == "own loop":
        called = [olla_fx.optimize(model, example) for model, example in loop.models]
    elif way == "torch.compile":
        called = [torch.compile(model, backend="olla_fx") for model, _ in loop.models]
    return partial(loop.step, called)


def live_peak_bytes(run: Run) -> int:
    """Return the most bytes alive at once in a step: buffers, and requests of the stock allocator.

    Two steps are recorded, since the first one's gradients are alive when the second begins.
    """
    with record_events() as recording:
        run()
        run()
    stock = baseline_from_events(event for event in recording.events if not event.served)
    return stock.live_peak_bytes + sum(buffer.buffer_bytes for buffer in alive(Buffer))


def planned_figures() -> dict[str, Any]:
    """Return what the reports of all planned modules say, summed up; nothing if there are none."""
    modules = alive(olla_fx.PlannedModule)
    if not modules:
        return {}
    plans = [module.plan for module in modules]
    return {
        "reported": sum(plan.buffer_bytes + plan.output_bytes for plan in plans),
        "operators": sum(len(plan.order) for plan in plans),
        "outside": sum(module.stats.counts.outside for module in modules),
        "stock_runs": sum(module.stats.stock_runs for module in modules),
        "bindings": sorted({module.stats.binding.value for module in modules}),
    }


def alive(kind: type[Kind]) -> list[Kind]:
    """Return all objects of a class in this process: ``torch.compile`` hands out none of its own."""
    return [held for held in gc.get_objects() if type(held) is kind]
