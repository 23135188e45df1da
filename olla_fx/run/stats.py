"""Reports how a planned module ran: its binding, allocation requests and cached plans."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from olla_fx.arena import Binding, RunCounts
from olla_fx.plan import Plan
from olla_fx.report import format_table
from olla_fx.run.cuda_graph import GraphedStep


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
        is_busy: True if the buffer holds such activations now.
        cached_plans: the number of plans that the module keeps.
        cache_size_limit: the number of plans that it may keep.
    """

    binding: Binding
    counts: RunCounts
    outside_log: tuple[str, ...]
    graph_modules: tuple[fx.GraphModule, ...]
    graphed: GraphedStep | None
    replans: int
    stock_runs: int
    is_busy: bool
    cached_plans: int
    cache_size_limit: int


@dataclass(frozen=True)
class StepReport:
    """A plan and the statistics of its last call; prints as a table.

    Attributes:
        plan: the plan in force.
        stats: of its module.
    """

    plan: Plan
    stats: StepStats

    def __str__(self) -> str:
        """Return the table."""
        counts = self.stats.counts
        rows = [
            *self.plan.rows(),
            ("arrays live in", self.stats.binding.value),
            ("requests served in the buffer", f"{counts.served:,}"),
            ("requests served outside, outputs", f"{counts.outputs:,}"),
            ("requests served outside, unexpected", f"{counts.outside:,}"),
            ("requests on worker threads", f"{counts.requests_on_worker_threads:,}"),
        ]
        return format_table(rows)
