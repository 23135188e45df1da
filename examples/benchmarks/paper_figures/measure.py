"""Takes one measurement, in the process that it is called in."""

from __future__ import annotations

import platform
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from ordering import TOKENS
from stopwatch import load_search, paired

import olla_fx
from olla_fx.alignment import alignment_of
from olla_fx.arena import Binding
from olla_fx.eager.baseline import BaselineSource
from olla_fx.models import ModelCase, build_model, optimizer_by_name
from olla_fx.step_plan import Plan
from olla_solvers.effort.progress import Improvement
from olla_solvers.placer import place_with

from . import traces
from .allocation import allocation_times
from .baselines import Needed, compiled_step, measured, measured_on_cuda, needed_of_events
from .jobs import Job

PAIRS = 3
"""Of eager and planned steps that are timed."""

ENOUGH_SECONDS = 60.0
"""No further pair is timed after as many."""

SETTLING = {"cpu": 1, "cuda": 2}
"""Calls until a step is recorded and planned again; on a GPU libraries choose their kernels in the first."""


def measure(job: Job) -> dict[str, Any]:
    """Take a measurement.

    Args:
        job: what to measure.

    Returns:
        Figures by name, ready for JSON.
    """
    kinds: dict[str, Callable[[Job], dict[str, Any]]] = {
        "step": _measure_step,
        "eager": _measure_eager,
        "inductor": _measure_inductor,
        "loop": _measure_loop,
        "pool": _measure_pool,
    }
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", RuntimeWarning)
        result = kinds[job.kind](job)
    if result.get("binding") == Binding.STOCK.value:
        words = dict.fromkeys(str(warning.message) for warning in seen if warning.category is RuntimeWarning)
        result["stock_because"] = " ".join(words) or "the planned allocator is switched off"
    return {**result, "versions": versions(job.device)}


def versions(device: str) -> dict[str, str]:
    """Return the versions of machine and libraries, for the record."""
    names = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device == "cuda":
        names |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
        names["cudnn"] = str(torch.backends.cudnn.version())
    return names


def _build(job: Job) -> tuple[ModelCase, torch.optim.Optimizer | None]:
    case = build_model(
        job.model_name, batch_size=job.batch, tokens=TOKENS, train=job.train, device=job.device
    )
    leave_recurrent_layers_to_pytorch(case.model)
    return case, optimizer_by_name("sgd", case.model.parameters()) if job.train else None


def leave_recurrent_layers_to_pytorch(model: torch.nn.Module) -> None:
    """Switch cuDNN off in this process if a model has recurrent layers, which no capture can hold with it.

    It also laid their weights into one storage when the model was moved.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            torch.backends.cudnn.enabled = False
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()


def _measure_step(job: Job) -> dict[str, Any]:
    """Measure OLLA's figures: what eager needs, what the plan needs, and the seconds of everything."""
    load_search()
    case, optimizer = _build(job)
    events, eager = _eager(job, case, optimizer)
    before = torch.cuda.memory_allocated() if job.device == "cuda" else 0
    step = _optimize(job, case, optimizer)
    figures = {"eager": eager.to_json()}
    if eager.source != BaselineSource.DISPATCHED:
        step(*case.inputs)  # recorded, and planned again with the kernels' workspaces
    if job.device == "cuda":
        figures["planned"] = measured_on_cuda(lambda: step(*case.inputs), before).to_json()
    times = allocation_times(events, job.device)
    figures["allocation"] = {
        "requests": times.requests,
        "stock_seconds": times.stock_seconds,
        "served_seconds": times.served_seconds,
    }
    return {**figures, **_plan_figures(step.plan), "binding": step.stats.binding.value}


def _eager(
    job: Job, case: ModelCase, optimizer: torch.optim.Optimizer | None, *, run: bool = True
) -> tuple[tuple[Any, ...], Needed]:
    """Return an eager step's requests, and the memory that they need."""
    if job.device == "cpu":
        events, source = traces.trace(case, optimizer, run=run)
        return events, needed_of_events(events, source)
    needed = measured(traces.eager_step(case, optimizer), job.device)
    return traces.followed(case, optimizer), needed


def _optimize(job: Job, case: ModelCase, optimizer: torch.optim.Optimizer | None) -> olla_fx.PlannedModule:
    return olla_fx.optimize(
        case.model,
        case.inputs,
        loss_fn=case.loss_fn,
        optimizer=optimizer,
        solver=job.solver,
        time_limit=job.time_limit,
    )


def _plan_figures(plan: Plan) -> dict[str, Any]:
    """Return what the figures take from a plan."""
    provenance = plan.provenance
    return {
        "operators": len(plan.order),
        "arrays": len(plan.offsets),
        "static_bytes": plan.static_bytes,
        "output_bytes": plan.output_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "buffer_bytes": plan.buffer_bytes,
        "fragmentation": plan.fragmentation,
        "timings": dict(plan.timings),
        "order_found_by": provenance.order_found_by,
        "order_proved_by": provenance.order_proved_by,
        "place_found_by": provenance.place_found_by,
        "place_proved_by": provenance.place_proved_by,
        "order_progress": [_point(point) for point in plan.memory.progress["order"]],
        "place_progress": [_point(point) for point in plan.memory.progress["place"]],
    }


def _point(improvement: Improvement) -> list[Any]:
    return [improvement.seconds, improvement.value_bytes, improvement.bound_bytes, improvement.method]


def _measure_eager(job: Job) -> dict[str, Any]:
    """Measure the eager step with the allocator's settings that this process was started with."""
    case, optimizer = _build(job)
    return {"needed": measured(traces.eager_step(case, optimizer), job.device).to_json()}


def _measure_inductor(job: Job) -> dict[str, Any]:
    case, optimizer = _build(job)
    if optimizer is None:
        raise ValueError("the compiled step is a training step")
    return {"needed": measured(compiled_step(case, optimizer), job.device).to_json()}


def _measure_loop(job: Job) -> dict[str, Any]:
    """Measure Sekiyama's figures: eager's requests at planned addresses, and the time of a step."""
    load_search()
    case, optimizer = _build(job)
    events, eager = _eager(job, case, optimizer, run=job.timed)
    spans = traces.spans_of(events, alignment_of(torch.device(job.device)))
    figures = {
        "eager": eager.to_json(),
        "requests": len(spans),
        "skyline_bytes": place_with(spans, method="skyline").height_bytes,
        "skyline_seconds": place_with(spans, method="skyline").seconds,
        "placed_bytes": place_with(spans, solver=job.solver, time_limit=job.time_limit).height_bytes,
    }
    step = _optimize(job, case, optimizer)
    if job.timed and eager.source != BaselineSource.DISPATCHED:
        figures |= times(case, optimizer, step, job.device)
    return {**figures, **_plan_figures(step.plan)}


def times(
    case: ModelCase, optimizer: torch.optim.Optimizer | None, step: Callable[..., object], device: str
) -> dict[str, float]:
    """Time an eager and a planned step: medians of pairs, in seconds.

    Args:
        case: model, example and loss.
        optimizer: for training.
        step: the planned step, not called yet.
        device: ``cpu`` or ``cuda``; eager has run there before.
    """
    eager = traces.eager_step(case, optimizer)

    def run(once: Callable[[], object]) -> Callable[[], None]:
        def wait() -> None:
            once()
            if device == "cuda":
                torch.cuda.synchronize()

        return wait

    runs = run(eager), run(lambda: step(*case.inputs))
    for _ in range(SETTLING[device]):
        runs[1]()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < PAIRS and sum(map(sum, pairs)) < ENOUGH_SECONDS:
        pairs.append(paired(*runs, len(pairs) % 2 == 0))
    return {
        "eager_seconds": statistics.median(seconds for seconds, _ in pairs),
        "planned_seconds": statistics.median(seconds for _, seconds in pairs),
    }


def _measure_pool(job: Job) -> dict[str, Any]:
    """Measure SmartPool's table: one iteration's requests, placed by several methods, over their peak."""
    load_search()
    case, optimizer = _build(job)
    events, eager = _eager(job, case, optimizer, run=False)
    spans = traces.spans_of(events)
    heights = {
        method: place_with(spans, method=method).height_bytes
        for method in ("size-first-fit", "size-best-fit", "skyline", "auto")
    }
    static = sum(tensor.nbytes for tensor in [*case.model.parameters(), *case.model.buffers()])
    return {
        "eager": eager.to_json(),
        "load_bytes": traces.live_peak_bytes(events),
        "requests": len(spans),
        "heights": heights,
        "static_bytes": static,
    }
