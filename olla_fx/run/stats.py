"""Reports how a planned module ran, beside what eager PyTorch needs for the same step.

Eager's step is followed under fake tensors. Its kernels' workspaces are those that the same operators showed
in the recorded planned run, as far as eager runs them on tensors of the same shapes, or the user's own
recording of their eager loop has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from olla_fx.arena import Binding, RunCounts
from olla_fx.capture import StepRequest
from olla_fx.capture.eager import follow_eager
from olla_fx.compiled import CompiledStep
from olla_fx.eager.baseline import Signature, baseline_from_events, operator_signature
from olla_fx.eager.record import Recording
from olla_fx.errors import RecordingError
from olla_fx.report import format_table
from olla_fx.run.cuda_graph import GraphedStep
from olla_fx.step_plan import Plan


@dataclass(frozen=True)
class StepStats:
    """The statistics of a planned module; of the last kind of call unless said otherwise.

    Attributes:
        binding: the memory of arrays: the buffer, or the stock allocator's.
        counts: allocation requests of the last complete run in the buffer.
        outside_log: the last run's unexpected requests, to find out the reason.
        graph_modules: the reordered graphs of all phases: in the caller's own loop forward and backward.
        graphed: with ``cuda_graph=True``: the numbers of captures and replays, or the reason for none.
        replans: the number of calls at which a step was planned again because model or optimizer changed.
        stock_runs: the number of calls that ran with the stock allocator because the buffer held the
            activations of a forward whose backward was still to come.
        eager_runs: the number of calls that the model itself ran, since no plan was there for them, or since
            the buffer was held as above and the plan needs less than 1 MiB.
        is_busy: True if the buffer holds such activations now.
        cached_plans: the number of plans that the module keeps.
        cache_size_limit: the number of plans that it may keep, beside those of families.
        families: the number of graphs that were captured once for all sizes of their inputs.
        stalled_seconds: for which operators of the last complete run in the buffer waited for copies between
            device and host, on a CPU; on CUDA 0, since streams wait, of which the host does not know.
    """

    binding: Binding
    counts: RunCounts
    outside_log: tuple[str, ...]
    graph_modules: tuple[fx.GraphModule, ...]
    graphed: GraphedStep | None
    replans: int
    stock_runs: int
    eager_runs: int
    is_busy: bool
    cached_plans: int
    cache_size_limit: int
    families: int
    stalled_seconds: float


@dataclass(frozen=True)
class StepReport:
    """A plan beside eager PyTorch, and the statistics of its last call; prints as tables.

    Attributes:
        plan: the plan in force, with eager's baselines.
        stats: of its module.
    """

    plan: Plan
    stats: StepStats

    def __str__(self) -> str:
        """Return the tables."""
        counts = self.stats.counts
        rows = [
            *self.plan.rows(),
            ("arrays live in", self.stats.binding.value),
            ("requests served in the buffer", f"{counts.served:,}"),
            ("requests served outside, outputs", f"{counts.outputs:,}"),
            ("requests served outside, unexpected", f"{counts.outside:,}"),
            ("requests on worker threads", f"{counts.requests_on_worker_threads:,}"),
            ("calls that ran in eager", f"{self.stats.eager_runs:,}"),
        ]
        return f"{format_table(self.plan.rows_of_totals())}\n\n{format_table(rows)}"


def report_on(
    steps: Sequence[CompiledStep], plan: Plan, request: StepRequest, stats: StepStats, eager: Recording | None
) -> StepReport:
    """Report on a step.

    Args:
        steps: the compiled step in force: several parts if it runs in micro-batches.
        plan: of all of them.
        request: the same step, to follow eager's.
        stats: of its module.
        eager: the user's recording of the same step in eager, if there is one.

    Raises:
        RecordingError: if the recording is empty.
    """
    followed = follow_eager(
        request,
        _workspaces(steps) if plan.workspaces_recorded else None,
        has_gradients=any(step.dataflow.gradients.added for step in steps),
    )
    baseline = followed.baseline(with_workspaces=True) if plan.workspaces_recorded else None
    if eager is not None:
        if not eager.events:
            raise RecordingError("nothing was recorded: run the eager step within olla_fx.record()")
        baseline = baseline_from_events(eager.events)
    return StepReport(replace(plan, baseline=followed.baseline(), baseline_with_workspaces=baseline), stats)


def _workspaces(steps: Sequence[CompiledStep]) -> dict[Signature, int]:
    """Return what operators requested beside their results in the recorded run, by what they read."""
    workspaces: dict[Signature, int] = {}
    operators = (
        pair
        for step in steps
        for pair in zip(step.dataflow.operators, step.plan.problem.operators, strict=True)
    )
    for node, operator in operators:
        if operator.workspace_bytes:
            arguments = fx.map_arg(node.args, lambda source: source.meta.get("val"))
            signature = operator_signature(node.target, arguments)
            workspaces[signature] = max(operator.workspace_bytes, workspaces.get(signature, 0))
    return workspaces
