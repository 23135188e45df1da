"""Traces what eager steps request of the allocator.

On a CPU a step is run and recorded if there is memory for it, kernels' workspaces included; else it is
followed on fake tensors, which compute nothing and need no memory, and workspaces remain unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from olla_fx.arena import AllocationEvent, EventKind, available, record_events
from olla_fx.capture import Mode, StepRequest
from olla_fx.capture.eager import FakeStep
from olla_fx.eager.baseline import BaselineSource, follow_step
from olla_fx.models import ModelCase
from olla_solvers.plan import Span

RESERVE_BYTES = 2**30
"""Kept free for what nobody counts: the interpreter, libraries, compiled kernels."""

MARGIN = 1.6
"""Scratch memory, copies and fragments, as a share of the arrays that fake tensors show."""


def eager_step(case: ModelCase, optimizer: torch.optim.Optimizer | None) -> Callable[[], object]:
    """Return the step as one writes it in PyTorch: training with an optimizer, else inference."""
    if optimizer is None:

        def infer() -> object:
            with torch.no_grad():
                return case.model(*case.inputs)

        return infer
    *inputs, target = case.inputs

    def train() -> object:
        loss = case.loss_fn(case.model(*inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # nothing is left for the next step
        return loss.detach()

    return train


def followed(case: ModelCase, optimizer: torch.optim.Optimizer | None) -> tuple[AllocationEvent, ...]:
    """Return the requests and frees of an eager step on fake tensors."""
    mode = Mode.INFERENCE if optimizer is None else Mode.TRAINING
    request = StepRequest(case.model, case.inputs, mode, case.loss_fn, optimizer)
    with torch.random.fork_rng(devices=[]):
        return follow_step(FakeStep(request)).events


def recorded(step: Callable[[], object]) -> tuple[AllocationEvent, ...]:
    """Run an eager step on a CPU; return its requests and frees."""
    with record_events() as recording:
        # Held until the recording ends: a step's results are alive at its end.
        results = step()
    del results
    return recording.events


def trace(
    case: ModelCase, optimizer: torch.optim.Optimizer | None, *, run: bool
) -> tuple[tuple[AllocationEvent, ...], BaselineSource]:
    """Return the requests of an eager step on a CPU, and their source.

    Args:
        case: model, example and loss.
        optimizer: for training; None for inference.
        run: True to run it if there are memory and the native allocator for it.
    """
    events = followed(case, optimizer)
    if not run or not available() or not fits(live_peak_bytes(events)):
        return events, BaselineSource.DISPATCHED
    return recorded(eager_step(case, optimizer)), BaselineSource.RECORDED


def fits(needed_bytes: int) -> bool:
    """Return True if this machine has the memory that a step needs beside its model."""
    return needed_bytes * MARGIN + RESERVE_BYTES < available_bytes()


def available_bytes() -> int:
    """Return the main memory that a new process can have without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available")


def live_peak_bytes(events: Sequence[AllocationEvent]) -> int:
    """Return the maximum of bytes requested and not yet freed."""
    live = peak = 0
    for event in events:
        live += event.size_bytes if event.kind is EventKind.ALLOC else -event.size_bytes
        peak = max(peak, live)
    return peak


def spans_of(events: Sequence[AllocationEvent], alignment: int = 1) -> list[Span]:
    """Return a trace's blocks as rectangles, in eager's own order, for placing them.

    Args:
        events: requests and frees; blocks that are never freed live to the end.
        alignment: bytes that offsets and sizes are multiples of.
    """
    freed = {event.block: time for time, event in enumerate(events) if event.kind is EventKind.FREE}
    return [
        Span(
            str(event.block),
            time,
            freed.get(event.block, len(events)),
            -(-event.size_bytes // alignment) * alignment,
            alignment,
        )
        for time, event in enumerate(events)
        if event.kind is EventKind.ALLOC and event.size_bytes
    ]
