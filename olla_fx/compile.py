"""The pipeline: capture → passes → dataflow → order → place → validate → emit.

:func:`compile_step` runs the stages one after the other: ``optimize``, ``plan`` and the backend of
``torch.compile`` call it. The runtime, which plans again once a run was recorded, calls its later part,
:func:`plan_captured`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from olla_fx import arena, disk_cache, torch_compat
from olla_fx.arena import Binding
from olla_fx.budget_error import budget_error
from olla_fx.capture import CapturedStep, Mode, Role, capture
from olla_fx.compiled import CompiledStep, CompileRequest, plan_of
from olla_fx.dataflow import Dataflow, GradientsInBuffer
from olla_fx.emit import EmittedStep, Handover, emit
from olla_fx.errors import BudgetError
from olla_fx.link import link_for
from olla_fx.memory_budget import MemoryBudget
from olla_fx.passes.rewrites.probes import Probe
from olla_fx.planned import planned
from olla_fx.progress import Progress
from olla_fx.recomputation import choose_recomputation
from olla_fx.report.table import format_bytes
from olla_fx.rewrites import LossChunks
from olla_fx.rewriting import Candidate, Rewriting, by_time, choose_rewrites
from olla_fx.sharing import choose_sharing
from olla_fx.step_plan import Plan
from olla_fx.swap_request import SwapRequest
from olla_fx.swapping import swap
from olla_fx.time_limit import TimeLimit
from olla_fx.within_budget import BudgetedStep, fits, is_same_graph, plan_within
from olla_solvers.effort.freed_memory import garbage_collected
from olla_solvers.plan import MemoryPlan
from olla_solvers.planner import make_plan
from olla_solvers.problem import Problem

logger = logging.getLogger(__name__)

SHARE_OF_CHOICE = 0.05
"""Of the user's time limit, what each order may take by which rewrites are chosen."""

SHARE_OF_BUDGET = 0.5
"""Beside the user's time limit, as a share of it, what the choice of what a memory budget needs may take."""

LEAST_OF_BUDGET = 5.0
"""Seconds that it may take in any case, so that integer programs have time to begin: a step that does not fit
for want of time is an error, too."""

PLANS_OF_BUDGET = 2
"""Plans with repetitions for which the plan without leaves time, each as much as it may take itself."""


def compile_step(request: CompileRequest) -> tuple[CompiledStep, CompiledStep | None]:
    """Capture and plan a step; runs nothing on real data.

    Returns:
        The step; and the weight update, if it is one of its own, after micro-batches.

    Raises:
        CaptureError: if the step cannot be captured; model and optimizer are untouched.
        BudgetError: if no plan within the memory budget is found.
        SolverUnavailableError: if a named solver cannot take a problem of this size.
    """
    with _told(request) as progress:
        return _compile_step(request, progress)


def _compile_step(request: CompileRequest, progress: Progress) -> tuple[CompiledStep, CompiledStep | None]:
    torch_compat.warn_if_newer_than_tested()
    seconds: dict[str, float] = {}
    with _timed("capture", seconds, progress):
        captured = capture(request.step)
    limit = request.limit or TimeLimit(request.step.options.time_limit, plans=0)
    limit.expect(1 if captured.update is None else 2)
    if request.budget_of(captured.mode) is not None:
        limit.expect(PLANS_OF_BUDGET)
    request = replace(request, limit=limit)
    # First the update, which is settled at once as a rule: what it leaves of the limit is the step's.
    update = None
    if captured.update is not None:
        update = _plan_captured(request, captured.update, progress, has_budget=False)
    step = _plan_captured(request, captured, progress)
    timings = {**seconds, **step.plan.timings}
    plan = plan_of(step, update)
    is_first = request.earlier_budget_bytes is None
    if is_first and plan.budget is not None and plan.budget.plain_bytes <= plan.budget.budget_bytes:
        logger.info(
            "the memory budget of %s is more than the step needs: nothing is recomputed",
            format_bytes(plan.budget.budget_bytes),
        )
    if not fits(plan):
        error = budget_error(plan, step.dataflow, captured.mode)
        if not request.may_exceed:
            raise error
        _warn_about_budget(error)
    return replace(step, plan=replace(step.plan, timings=timings)), update


def plan_captured(request: CompileRequest, captured: CapturedStep) -> CompiledStep:
    """Plan what was captured; runs nothing on real data.

    Args:
        request: what it was captured for.
        captured: the step, or the update after its micro-batches.

    Raises:
        SolverUnavailableError: if a named solver cannot take a problem of this size.
    """
    with _told(request) as progress:
        return _plan_captured(request, captured, progress)


def _plan_captured(
    request: CompileRequest, captured: CapturedStep, progress: Progress, *, has_budget: bool = True
) -> CompiledStep:
    seconds: dict[str, float] = {}

    def make(candidate: Candidate, enough_bytes: int = 0, problem: Problem | None = None) -> Plan:
        """Order and place a candidate."""
        chosen = problem or candidate.dataflow.problem
        start = _start(candidate)
        memory = _memory_plan(request, chosen, captured.device, progress, start, enough_bytes)
        seconds.update(memory.timings)
        return planned(captured, candidate, chosen, memory, is_recorded=problem is not None)

    options, budgeted, refused = request.step.options, None, dict[str, None]()
    budget = request.budget_of(captured.mode) if has_budget else None
    if request.earlier is not None:
        seconds.update(request.earlier.plan.timings)
        candidate, plan, budgeted = _planned_again(request, request.earlier, make)
    else:
        with _timed("passes", seconds, progress):
            rewriting = _rewriting(request, captured, refused)
            candidate = choose_rewrites(rewriting, options.rewrites)
            if budget is None:
                candidate = _without_budget(request, rewriting, candidate)
        if budget is not None:
            with _timed("budget", seconds, progress):
                candidate, plan, budgeted = _within_budget(request, rewriting, candidate, budget, make)
            seconds["budget"] -= sum(plan.memory.timings.values())
        else:
            plan = make(candidate)
        plan = replace(plan, refused=tuple(refused))
    return _emitted(request, captured, candidate.dataflow, plan, budgeted, seconds, progress)


def _within_budget(
    request: CompileRequest,
    rewriting: Rewriting,
    candidate: Candidate,
    budget: MemoryBudget,
    make: Callable[..., Plan],
) -> tuple[Candidate, Plan, BudgetedStep]:
    """Return the fastest plan within a memory budget, its graph, and what is needed to choose again."""
    options, most = request.step.options, math.inf
    if options.time_limit is not None:
        most = max(LEAST_OF_BUDGET, SHARE_OF_BUDGET * options.time_limit)
    candidates = by_time(rewriting, candidate)
    budgeted = BudgetedStep(
        rewriting,
        tuple(timed.wanted for timed in candidates),
        budget,
        options.memory_budget_includes is not None,
        most,
        request.profile,
        options.solver,
        link_for(options, rewriting.captured.device),
    )
    candidate, plan = plan_within(budgeted, make, candidates)
    return candidate, plan, replace(budgeted, is_missed=not fits(plan))


def _planned_again(
    request: CompileRequest, earlier: CompiledStep, make: Callable[..., Plan]
) -> tuple[Candidate, Plan, BudgetedStep | None]:
    """Plan a graph again; with a budget and recorded workspaces, perhaps another one, which was never run."""
    told = earlier.plan
    before = Candidate(earlier.dataflow, told.changes, recomputed=told.recomputed, swapped=told.swapped)
    enough_bytes = 0
    if told.memory_budget_bytes is not None:
        enough_bytes = max(0, told.memory_budget_bytes - told.needed_bytes + told.buffer_bytes)
    is_first = earlier.budgeted is not None and earlier.budgeted.choices == 0
    if is_first and request.limit is not None:
        # This one, the one without repetitions, and those with.
        request.limit.expect(1 + PLANS_OF_BUDGET)
    plan = make(before, enough_bytes, request.problem)
    plan = replace(plan, refused=told.refused, budget=told.budget)
    budgeted = earlier.budgeted
    if budgeted is None or request.problem is None:
        return before, plan, budgeted
    if budgeted.chooses_again(plan):
        budgeted = budgeted.knowing(earlier.dataflow, plan)
        candidate, again = plan_within(budgeted, make)
        budgeted = replace(budgeted, is_missed=not fits(again))
        again = replace(again, refused=told.refused)
        plan = replace(plan, budget=again.budget)
        if is_same_graph(candidate.dataflow, before.dataflow):
            plan = replace(plan, recomputed=again.recomputed, swapped=again.swapped)
        elif fits(again) or again.needed_bytes < plan.needed_bytes:
            return candidate, again, budgeted
    if not fits(plan):
        _warn_about_budget(budget_error(plan, before.dataflow, request.step.mode))
    return before, plan, budgeted


def _warn_about_budget(error: BudgetError) -> None:
    warnings.warn(f"{error}. The step runs with it", RuntimeWarning, stacklevel=2)


def _emitted(
    request: CompileRequest,
    captured: CapturedStep,
    dataflow: Dataflow,
    plan: Plan,
    budgeted: BudgetedStep | None,
    seconds: dict[str, float],
    progress: Progress,
) -> CompiledStep:
    """Write the code of a plan."""
    # But for a budget nothing needs the captured graph again, and a graph is large.
    captured = replace(captured, graph_module=dataflow.graph_module)
    if request.runs:
        # The first time on a machine, the allocator is compiled.
        progress.begin("build")
    in_buffer = request.runs and request.in_buffer and arena.available(captured.device)
    emitted = EmittedStep((), Handover(), partial(tuple))
    if request.runs:
        with _timed("emit", seconds, progress):
            emitted = emit(
                dataflow,
                plan.problem,
                plan.memory,
                captured.inputs,
                arena.native_module(captured.device.type),
                in_buffer=in_buffer,
            )
    if in_buffer:
        seconds["build"] = arena.build_seconds() or 0.0
    binding = Binding.BUFFER if in_buffer else Binding.STOCK
    return CompiledStep(captured, dataflow, replace(plan, timings=seconds), binding, emitted, budgeted)


def _rewriting(request: CompileRequest, captured: CapturedStep, refused: dict[str, None]) -> Rewriting:
    """Return what candidates of the step are made with; notes what kernels' bits do not allow."""

    def remember(question: Mapping[str, Any], ask: Callable[[], bool]) -> bool:
        agrees = disk_cache.remembered(captured.device, question, ask)
        if not agrees:
            refused[next(iter(question))] = None
        return agrees

    probe = Probe(captured.device, request.runs, remember, not request.step.options.cuda_graph)
    options = request.step.options
    seconds = math.inf if options.time_limit is None else SHARE_OF_CHOICE * options.time_limit
    chunks = None if options.loss_chunks is None else LossChunks(options.loss_chunks, may_differ=True)
    return Rewriting(captured, _usual_gradients(captured), probe, seconds, chunks)


def _without_budget(request: CompileRequest, rewriting: Rewriting, candidate: Candidate) -> Candidate:
    """Return the step with what is computed again nearly for free, what is written over, and what waits."""
    if rewriting.captured.mode is not Mode.INFERENCE:
        share = request.step.options.recompute_share
        candidate = choose_recomputation(rewriting, candidate, share, request.profile)
    candidate = choose_sharing(rewriting, candidate)
    if isinstance(request.step.options.swap, SwapRequest):
        candidate = swap(rewriting, candidate, request.step.options.swap, request.profile)
    return candidate


def _start(candidate: Candidate) -> list[str] | None:
    """Return the order that a candidate has, by its operators' names."""
    if candidate.schedule is None:
        return None
    operators = candidate.dataflow.problem.operators
    return [operators[operator].name for operator in candidate.schedule.order]


def _memory_plan(
    request: CompileRequest,
    problem: Problem,
    device: torch.device,
    progress: Progress,
    start: Sequence[str] | None,
    enough_bytes: int,
) -> MemoryPlan:
    """Order and place a problem, beginning from a given order; or read the plan of an earlier program."""
    solver, seconds_of_call = request.step.options.solver, request.step.options.time_limit
    planner_options = {"solver": solver, "time_limit": seconds_of_call, "enough_bytes": enough_bytes}
    path = disk_cache.plan_path(problem, planner_options, device) if request.runs else None
    memory = disk_cache.load_plan(path, problem)
    if memory is not None:
        return memory
    start = start or request.start
    if start is None and request.earlier is not None:
        start = request.earlier.plan.order
    with (request.limit or TimeLimit(seconds_of_call)).next_plan() as time_limit:
        progress.begin("order", f"{len(problem.operators):,} operators")
        memory = make_plan(
            problem,
            solver=solver,
            time_limit=time_limit,
            start=start,
            enough_bytes=enough_bytes,
            observer=progress.note,
        )
    disk_cache.save_plan(path, memory)
    return memory


def _usual_gradients(captured: CapturedStep) -> GradientsInBuffer:
    """Return which gradients a plan in the caller's own loop has in the buffer until a backward has run."""
    pairs = enumerate(captured.gradients)
    return GradientsInBuffer(
        frozenset(at for at, index in pairs if captured.inputs[index].role is Role.PARAMETER)
    )


@contextlib.contextmanager
def _told(request: CompileRequest) -> Iterator[Progress]:
    """Yield what tells the progress of a request: its caller's, or one of its own."""
    with garbage_collected():
        if request.progress is not None:
            yield request.progress
            return
        with Progress() as progress:
            yield progress


@contextlib.contextmanager
def _timed(stage: str, seconds: dict[str, float], progress: Progress) -> Iterator[None]:
    progress.begin(stage)
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started
