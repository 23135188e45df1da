"""The plan of a step as its user sees it: an order, an address for every array, and their figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olla_fx.eager.baseline import Baseline
from olla_fx.report.plot import plot_plan
from olla_fx.report.snapshot import write_snapshot
from olla_fx.report.table import format_bytes, format_table
from olla_solvers.errors import ProblemError
from olla_solvers.plan import MemoryPlan, Provenance
from olla_solvers.plan_json import plan_from_json, plan_to_json
from olla_solvers.problem import ArrayKind, Offset, Problem
from olla_solvers.validate import validate

FORMAT = 1


@dataclass(frozen=True, repr=False)
class Plan:
    """A validated plan; prints as one line, and :meth:`report` as a table.

    Attributes:
        problem: the operators and arrays that were planned.
        memory: order, offsets and figures.
        baseline: what eager PyTorch needs for the same step; None if nobody asked.
        timings: seconds a stage: ``capture``, ``passes``, ``dataflow``, ``order``, ``place``, ``emit``.
        recomputed_operators: operators that run a second time because the model checkpoints activations.
        micro_batches: how often the planned operators run in a step, with one part of the batch after the
            other. Their gradients accumulate in static arrays.
        update: the plan of the weight update that follows several micro-batches, in the same buffer. The
            figures below are of both.
    """

    problem: Problem
    memory: MemoryPlan
    baseline: Baseline | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    recomputed_operators: int = 0
    micro_batches: int = 1
    update: Plan | None = None

    @property
    def order(self) -> tuple[str, ...]:
        """Operator names, first to last."""
        return self.memory.order

    @property
    def offsets(self) -> Mapping[str, Offset]:
        """Array name → offset in the buffer, in bytes."""
        return self.memory.offsets

    @property
    def buffer_bytes(self) -> int:
        """Size of the one buffer."""
        return max(plan.memory.buffer_bytes for plan in self._parts)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of planned arrays and workspaces alive at once."""
        return max(plan.memory.peak_bytes for plan in self._parts)

    @property
    def lower_bound_bytes(self) -> int:
        """The peak that no order can beat, in bytes."""
        return max(plan.memory.lower_bound_bytes for plan in self._parts)

    @property
    def is_optimal(self) -> bool:
        """Return True if the peak equals the proven bound."""
        return self.peak_bytes == self.lower_bound_bytes

    @property
    def fragmentation(self) -> float:
        """``(buffer - peak) / buffer``."""
        return (self.buffer_bytes - self.peak_bytes) / self.buffer_bytes if self.buffer_bytes else 0.0

    @property
    def provenance(self) -> Provenance:
        """The methods that found and proved order and placement."""
        return self.memory.provenance

    @property
    def static_bytes(self) -> int:
        """Parameters, buffers, optimizer state and inputs: the caller's, alive all the time."""
        return self.problem.static_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes that the step hands to the caller, allocated outside the buffer."""
        sizes = (array.size_bytes for array in self.problem.arrays if array.kind is ArrayKind.OUTPUT)
        return sum(sizes) * self.micro_batches

    @property
    def workspace_bytes(self) -> int:
        """Largest workspace of one operator; 0 until a step was recorded."""
        operators = (operator for plan in self._parts for operator in plan.problem.operators)
        return max((operator.workspace_bytes for operator in operators), default=0)

    @property
    def _parts(self) -> tuple[Plan, ...]:
        """The plans that run in the buffer, one after the other."""
        return (self,) if self.update is None else (self, self.update)

    @property
    def total_bytes(self) -> int:
        """Static, output and buffer bytes together."""
        return self.static_bytes + self.output_bytes + self.buffer_bytes

    def __repr__(self) -> str:
        """Return the figures that matter, in one line."""
        optimal = "proven smallest" if self.is_optimal else f"at least {format_bytes(self.lower_bound_bytes)}"
        return (
            f"<Plan of {len(self.order):,} operators: peak {format_bytes(self.peak_bytes)} ({optimal}), "
            f"buffer {format_bytes(self.buffer_bytes)}>"
        )

    def report(self) -> str:
        """Return the figures as a table."""
        return format_table(self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of :meth:`report`: a name and a figure with its unit."""
        gap = (self.peak_bytes - self.lower_bound_bytes) / self.peak_bytes if self.peak_bytes else 0.0
        rows = [
            ("operators", f"{len(self.order):,}"),
            ("planned peak", format_bytes(self.peak_bytes)),
            ("lower bound", format_bytes(self.lower_bound_bytes)),
            ("optimal", "yes, proven" if self.is_optimal else f"gap {gap:.2%}"),
            ("buffer", format_bytes(self.buffer_bytes)),
            ("fragmentation", f"{self.fragmentation:.2%}"),
            ("largest workspace", format_bytes(self.workspace_bytes)),
            ("outputs, outside the buffer", format_bytes(self.output_bytes)),
            ("static (parameters, state, inputs)", format_bytes(self.static_bytes)),
            ("static, outputs and buffer", format_bytes(self.total_bytes)),
        ]
        if self.baseline is not None:
            rows += [
                (f"eager live peak ({self.baseline.source})", format_bytes(self.baseline.live_peak_bytes)),
                ("eager reserved (caching allocator model)", format_bytes(self.baseline.reserved_bytes)),
                ("eager fragmentation", f"{self.baseline.fragmentation:.2%}"),
            ]
        if self.update is not None:
            rows += [
                ("micro-batches, each of these operators", f"{self.micro_batches:,}"),
                ("operators of the update after them", f"{len(self.update.order):,}"),
            ]
        if self.recomputed_operators:
            rows.append(("operators recomputed for checkpoints", f"{self.recomputed_operators:,}"))
        methods = f"{self.provenance.order_found_by} / {self.provenance.order_proved_by or 'open'}"
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.timings.items())
        return [*rows, ("order found by / proved by", methods), ("seconds", stages)]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready dictionaries; :meth:`from_json` reads it."""
        return {
            "format": FORMAT,
            "problem": self.problem.to_json(),
            "plan": plan_to_json(self.memory),
            "baseline": None if self.baseline is None else self.baseline.to_json(),
            "timings": dict(self.timings),
            "recomputed_operators": self.recomputed_operators,
            "micro_batches": self.micro_batches,
            "update": None if self.update is None else self.update.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        """Read what :meth:`to_json` writes, and validate it.

        Raises:
            ProblemError: if the document is no plan.
            ValidationError: if the plan breaks its problem.
        """
        if not isinstance(document, Mapping) or document.get("format") != FORMAT:
            raise ProblemError("not a plan written by olla_fx, or of another format")
        try:
            problem = Problem.from_json(document["problem"])
            memory = plan_from_json(document["plan"])
            baseline = document["baseline"]
            timings = dict(document["timings"])
            recomputed = int(document["recomputed_operators"])
            micro_batches = int(document.get("micro_batches", 1))
            update = document.get("update")
        except (KeyError, TypeError) as error:
            raise ProblemError(f"the plan lacks {error}") from error
        validate(problem, memory)
        eager = None if baseline is None else Baseline.from_json(baseline)
        later = None if update is None else cls.from_json(update)
        return cls(problem, memory, eager, timings, recomputed, micro_batches, later)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file and validate it.

        Raises:
            ProblemError: if the file is no plan; names the file.
            ValidationError: if the plan breaks its problem.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ProblemError(f"{path}: {error}") from error

    def plot(self, path: str | Path) -> None:
        """Draw every array as a rectangle, time by bytes, into an image file.

        Args:
            path: its suffix chooses the format: ``.png``, ``.svg``, ``.pdf``.

        Raises:
            ImportError: if matplotlib is not installed; names the extra.
        """
        plot_plan(self.problem, self.memory, path)

    def to_snapshot(self, path: str | Path) -> None:
        """Write the planned step as a memory snapshot that PyTorch's memory viewer shows.

        Args:
            path: of the pickle file, as ``torch.cuda.memory._dump_snapshot`` writes it.
        """
        write_snapshot(self.problem, self.memory, path)
