"""Measures what an eager step needs, on either device, in the same terms.

On a CPU that is the step's recorded trace, and a model of the CUDA caching allocator fed with it. On a GPU it
is what ``torch.cuda``'s statistics say. Bytes of parameters, state and inputs are not in these figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from olla_fx.arena import AllocationEvent
from olla_fx.eager.baseline import BaselineSource, baseline_from_events
from olla_fx.models import ModelCase

from . import traces

MEASURED = "measured on the GPU"


@dataclass(frozen=True)
class Needed:
    """The memory that a step needs beside what is allocated before it.

    Attributes:
        live_bytes: most bytes requested and not yet freed (OLLA §5.3).
        reserved_bytes: what the allocator reserved, or would have, for this.
        fragmentation: share of these reserved bytes that is not in use at their peak (OLLA §5.4), 0 to 1.
        source: how it was seen.
        allocator: the settings of the allocator, or its model.
    """

    live_bytes: int
    reserved_bytes: int
    fragmentation: float
    source: str
    allocator: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def needed_of_events(events: tuple[AllocationEvent, ...], source: BaselineSource) -> Needed:
    """Return what a trace needs, by the model of the caching allocator."""
    baseline = baseline_from_events(events, source)
    return Needed(
        baseline.live_peak_bytes,
        baseline.reserved_bytes,
        baseline.fragmentation,
        source.value,
        "model of the CUDA caching allocator",
    )


def measured_on_cuda(step: Callable[[], object], before_bytes: int | None = None) -> Needed:
    """Measure what a step on the GPU needs, by the allocator's own statistics.

    Args:
        step: runs one step; its first run is not measured.
        before_bytes: what does not count, parameters mostly; None for what is allocated before the step.
    """
    from olla_fx.eager.recorded_cuda import measure_cuda_baseline

    device = torch.device("cuda")
    step()  # libraries' handles and persistent workspaces, choices of kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device) if before_bytes is None else before_bytes
    baseline = measure_cuda_baseline(step, device)
    reserved_bytes = baseline.max_reserved_bytes - before
    wasted_bytes = baseline.fragmentation * baseline.max_reserved_bytes
    return Needed(
        baseline.max_allocated_bytes - before,
        reserved_bytes,
        wasted_bytes / reserved_bytes if reserved_bytes else 0.0,
        MEASURED,
        baseline.allocator_settings or "default",
    )


def compiled_step(case: ModelCase, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Compile the step by torch.compile: inductor reorders for the smallest peak memory itself."""
    import torch._inductor.config as inductor

    inductor.reorder_for_peak_memory = True
    *inputs, target = case.inputs
    loss_of = torch.compile(lambda *given: case.loss_fn(case.model(*given[:-1]), given[-1]))
    update = torch.compile(optimizer.step)

    def train() -> object:
        loss = loss_of(*inputs, target)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.detach()

    return train


def measured(step: Callable[[], object], device: str) -> Needed:
    """Run a step and measure what it needs; its first run is not measured."""
    if device == "cuda":
        return measured_on_cuda(step)
    step()
    return needed_of_events(traces.recorded(step), BaselineSource.RECORDED)
