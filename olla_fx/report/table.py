"""Plain-text tables; every figure with its unit, a MiB being 2**20 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olla_fx.plan import Plan
    from olla_fx.run.executor import Binding, RunCounts

MIB = 2**20


def format_bytes(size_bytes: int) -> str:
    """Such as ``38.91 MiB``; below a tenth of a MiB in bytes."""
    return f"{size_bytes / MIB:,.2f} MiB" if size_bytes >= MIB / 10 else f"{size_bytes:,} B"


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, the second aligned to the right."""
    left = max((len(name) for name, _ in rows), default=0)
    right = max((len(value) for _, value in rows), default=0)
    return "\n".join(f"{name:<{left}}  {value:>{right}}" for name, value in rows)


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """A plan's figures as rows of a table."""
    rows = [
        ("operators", f"{len(plan.order):,}"),
        ("planned peak", format_bytes(plan.peak_bytes)),
        ("buffer", format_bytes(plan.buffer_bytes)),
        ("lower bound", format_bytes(plan.lower_bound_bytes)),
        ("optimal", "yes, proven" if plan.is_optimal else f"gap {_gap(plan):.2%}"),
        ("fragmentation", f"{plan.fragmentation:.2%}"),
        ("largest workspace", format_bytes(plan.workspace_bytes)),
        ("outputs, outside the buffer", format_bytes(plan.output_bytes)),
        ("static (parameters, state, inputs)", format_bytes(plan.static_bytes)),
        ("static, outputs and buffer", format_bytes(plan.total_bytes)),
        ("order found by / proved by", _methods(plan)),
    ]
    if plan.recomputed_operators:
        rows.append(("operators recomputed for checkpoints", f"{plan.recomputed_operators:,}"))
    if plan.baseline is not None:
        rows += [
            (f"eager live peak ({plan.baseline.source})", format_bytes(plan.baseline.live_peak_bytes)),
            ("eager reserved (caching allocator model)", format_bytes(plan.baseline.reserved_bytes)),
            ("eager fragmentation", f"{plan.baseline.fragmentation:.2%}"),
        ]
    rows += [(f"seconds: {stage}", f"{seconds:.2f}") for stage, seconds in plan.timings.items()]
    return rows


def _gap(plan: Plan) -> float:
    return (plan.peak_bytes - plan.lower_bound_bytes) / plan.peak_bytes


def _methods(plan: Plan) -> str:
    provenance = plan.provenance
    return f"{provenance.order_found_by} / {provenance.order_proved_by or 'open'}"


@dataclass(frozen=True)
class StepReport:
    """A plan and how its last call was served; prints as a table.

    Attributes:
        plan: the plan in force.
        binding: where arrays live.
        counts: allocation requests of the last call.
    """

    plan: Plan
    binding: Binding
    counts: RunCounts

    def __str__(self) -> str:
        """The table."""
        rows = [
            *plan_rows(self.plan),
            ("binding", self.binding.value),
            ("requests served in the buffer", f"{self.counts.served:,}"),
            ("requests served outside, outputs", f"{self.counts.outputs:,}"),
            ("requests served outside, unexpected", f"{self.counts.outside:,}"),
            ("requests on worker threads", f"{self.counts.requests_on_worker_threads:,}"),
        ]
        return format_table(rows)
