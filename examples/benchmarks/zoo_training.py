"""Trains a model of the zoo for some steps, eager and planned, and compares the two bit for bit.

Both start from the same weights, inputs and random numbers. Of losses, parameters, buffers, optimizer state
and the generator's state digests are compared; where they differ, eager is run once more, to tell if it is
equal to itself. With a memory budget what the last step had requested at its peak is measured, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from zoo_models import SEED, build
from zoo_transformers import BATCH

import olla_fx
from olla_fx.eager.baseline import baseline_from_events
from olla_fx.errors import BudgetError, OllaError
from olla_fx.integrations.in_place import PlannedCalls
from olla_fx.models import ModelCase, optimizer_by_name
from olla_fx.options import Options
from olla_fx.step_plan import Plan

STEPS = 2
STEPS_TO_SETTLE = 5
"""With a memory budget the step may be chosen again after each of the first runs."""

LEARNING_RATE = 1e-3

PASS = "pass"
EAGER = "eager"
"""Refused by ``optimize``; left to eager by a callback, it trains as it does without olla_fx."""

NO_PLAN = "no plan"
"""``optimize`` finds none within the memory budget, and says so."""

NO_PLAN_WITH_WORKSPACES = "no plan with workspaces"
"""None is found once the kernels' workspaces are known; a warning says so, and the smallest plan runs."""


@dataclass
class Row:
    """The outcome of one model.

    Attributes:
        name: of the model.
        family: one of :data:`zoo_models.FAMILIES`.
        status: :data:`PASS`, :data:`EAGER`, or in a word what went wrong.
        reason: why, for people; empty when it passed.
        parameters: how many numbers it learns.
        operators: of the planned step.
        recomputed: how many of them run a second time.
        static_bytes: of parameters, buffers, optimizer state and inputs.
        buffer_bytes: of the planned buffer.
        budget_bytes: of memory; 0 without a budget.
        plain_bytes: what the step needs of it without recomputation.
        needed_bytes: what the plan needs of it.
        peak_bytes: the most that the last step had requested and not yet freed, with a budget.
        extra_time: of what is computed again, predicted, as a share of the step's time.
        served: requests that the buffer served in the second step.
        outside: requests expected in the buffer that it did not serve.
        worker_requests: requests of kernels' own threads, which are never served.
        losses: of the steps.
        seconds: wall-clock time of all of it.
    """

    name: str
    family: str
    status: str = "error"
    reason: str = ""
    parameters: int = 0
    operators: int = 0
    recomputed: int = 0
    static_bytes: int = 0
    buffer_bytes: int = 0
    budget_bytes: int = 0
    plain_bytes: int = 0
    needed_bytes: int = 0
    peak_bytes: int = 0
    extra_time: float = 0.0
    served: int = 0
    outside: int = 0
    worker_requests: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Training:
    """How models are trained.

    Attributes:
        optimizer: its name.
        dtype: of parameters and images.
        planning: options of :func:`olla_fx.optimize`.
        batch: how many examples a step sees.
    """

    optimizer: str
    dtype: torch.dtype = torch.float32
    planning: Mapping[str, Any] = field(default_factory=dict)
    batch: int = BATCH

    @property
    def has_budget(self) -> bool:
        """Return True if planning is asked to keep a memory budget."""
        return self.planning.get("memory_budget") is not None

    @property
    def steps(self) -> int:
        """How many steps a training has."""
        return STEPS_TO_SETTLE if self.has_budget else STEPS

    def build(self, row: Row) -> tuple[ModelCase, torch.optim.Optimizer]:
        """Return a model with its inputs, and an optimizer of its parameters."""
        case = build(row.family, row.name, self.batch)
        model = case.model.to(self.dtype)
        inputs = tuple(item.to(self.dtype) if item.is_floating_point() else item for item in case.inputs)
        return replace(case, model=model, inputs=inputs), optimizer_by_name(
            self.optimizer, model.parameters(), lr=LEARNING_RATE
        )


def try_model(row: Row, training: Training) -> None:
    """Train a model in eager and planned, and fill in what came of it."""
    try:
        expected = train_eager(row, training)
    except Exception as error:
        row.status, row.reason = "eager fails", f"{type(error).__name__}: {first_line(error)}"
        return
    try:
        given = train_planned(row, training)
    except BudgetError as error:
        row.status, row.reason = NO_PLAN, first_line(error)
        return
    except OllaError as error:
        row.status, row.reason = "refused", f"{type(error).__name__}: {error}"
        calls = PlannedCalls(Options(**training.planning))
        different = difference(row, training, expected, train_eager(row, training, calls))
        if different is not None:
            row.reason += f" (left to eager: {': '.join(different)})"
        elif not calls.plans:
            row.status = EAGER
        return
    different = difference(row, training, expected, given)
    if different is not None:
        row.status, row.reason = different
    elif not row.reason:
        row.status = PASS


def difference(
    row: Row, training: Training, expected: dict[str, str], given: dict[str, str]
) -> tuple[str, str] | None:
    """Return in a word and in a sentence how a training differs from eager; None if it does not."""
    different = [name for name in expected if expected[name] != given.get(name)]
    if expected.keys() == given.keys() and not different:
        return None
    again = train_eager(row, training)
    unstable = [name for name in expected if expected[name] != again[name]]
    first = next(iter(unstable or different or expected.keys() ^ given.keys()))
    reason = f"{len(unstable or different)} of {len(expected)} differ, the first is {first}"
    return "eager not deterministic" if unstable else "differs", reason


def train_eager(row: Row, training: Training, calls: PlannedCalls | None = None) -> dict[str, str]:
    """Train in eager, or with calls planned as the callbacks do; return fingerprints of what it changes."""
    case, optimizer = training.build(row)
    if calls is not None:
        calls.add({"": case.model})
    prints = {}
    for index, (*inputs, target) in enumerate(_batches(case, training.steps), 1):
        torch.manual_seed(SEED + index)
        optimizer.zero_grad()
        loss = case.loss_fn(case.model(*inputs), target)
        loss.backward()
        optimizer.step()
        prints[f"loss of step {index}"] = fingerprint(loss)
        del loss
    return prints | fingerprints(case, optimizer)


def train_planned(row: Row, training: Training) -> dict[str, str]:
    """Train in planned steps; likewise, and put the counts of the last step into the row."""
    case, optimizer = training.build(row)
    row.parameters = sum(parameter.numel() for parameter in case.model.parameters())
    step = olla_fx.optimize(
        case.model, case.inputs, loss_fn=case.loss_fn, optimizer=optimizer, **training.planning
    )
    prints = {}
    for index, batch in enumerate(_batches(case, training.steps), 1):
        torch.manual_seed(SEED + index)
        step.poison()  # no step may depend on what the last one left in the buffer
        if training.has_budget and index == training.steps:
            with olla_fx.record() as recording:
                loss = step(*batch)
            row.peak_bytes = baseline_from_events(recording.events).live_peak_bytes
        else:
            loss = step(*batch)
        prints[f"loss of step {index}"] = fingerprint(loss)
        row.losses.append(float(loss))
    counts, plan = step.stats.counts, step.plan
    row.operators, row.recomputed = len(plan.problem.operators), plan.recomputed.operators
    row.static_bytes, row.buffer_bytes = plan.static_bytes, plan.buffer_bytes
    row.served, row.outside, row.worker_requests = (
        counts.served, counts.outside, counts.requests_on_worker_threads,
    )  # fmt: skip
    if step.stats.binding != "buffer":
        row.status, row.reason = "stock allocator", "no buffer was bound: is a C++ compiler there?"
    elif counts.outside or not counts.served:
        row.status = "outside the buffer"
        row.reason = f"{counts.outside} requests: {'; '.join(step.stats.outside_log[:3])}"
    elif step.stats.replans:
        row.status, row.reason = "planned again", "a later step did not fit the plan of the first"
    elif plan.budget is not None:
        _judge_budget(row, plan)
    return prints | fingerprints(case, optimizer)


def _judge_budget(row: Row, plan: Plan) -> None:
    """Say of a settled step if it needs more than its memory budget."""
    row.budget_bytes, row.plain_bytes = plan.budget.budget_bytes, plan.budget.plain_bytes
    row.needed_bytes, row.extra_time = plan.needed_bytes, plan.extra_time
    row.static_bytes = plan.static_bytes
    if not plan.workspaces_recorded:
        row.status, row.reason = "not settled", f"after {STEPS_TO_SETTLE} steps"
    elif row.peak_bytes > row.needed_bytes:
        row.status = "above the plan"
        row.reason = f"{row.peak_bytes:,} B requested at the peak, {row.needed_bytes:,} B planned"
    elif row.needed_bytes > row.budget_bytes:
        row.status = NO_PLAN_WITH_WORKSPACES
        row.reason = f"needs {row.needed_bytes:,} B of {row.budget_bytes:,} B"


def _batches(case: ModelCase, steps: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the example, and then the same with its examples in reverse order, but not their targets."""
    *inputs, target = case.inputs
    for index in range(steps):
        turned = [tensor.flip(0) if index % 2 else tensor.clone() for tensor in inputs]
        yield (*turned, target.clone())


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a digest that differs if a bit of the tensor does."""
    elements = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.blake2b(elements.numpy().data, digest_size=16).hexdigest()
    return f"{tensor.dtype} {list(tensor.shape)} {digest}"


def fingerprints(case: ModelCase, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return digests of all tensors that training changes, and of the random generator's state."""
    tensors: dict[str, torch.Tensor] = {"random numbers": torch.get_rng_state()}
    names = {}
    for name, parameter in case.model.named_parameters():
        tensors[f"parameter {name}"] = parameter
        names[parameter] = name
    tensors |= {f"buffer {name}": buffer for name, buffer in case.model.named_buffers()}
    for parameter, state in optimizer.state.items():
        for path, leaf in pytree.tree_flatten_with_path(state)[0]:
            if isinstance(leaf, torch.Tensor):
                tensors[f"state {names[parameter]}{pytree.keystr(path)}"] = leaf
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    text = str(error).strip()
    return text.splitlines()[0] if text else ""
