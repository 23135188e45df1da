"""The plan of a step as its user sees it: an order, an address for every array, and their figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from olla_fx.at_peak import ArrayAtPeak
from olla_fx.eager.baseline import Baseline, eager_totals
from olla_fx.recomputed import BudgetTerms, Recomputed
from olla_fx.report.plot import plot_plan
from olla_fx.report.snapshot import write_snapshot
from olla_fx.report.table import format_bytes, format_table
from olla_fx.report.totals import Totals, rows_of_totals
from olla_fx.rewrites import Change
from olla_fx.rewritten import rows_of_changes
from olla_fx.swapped import Swapped
from olla_solvers.analysis import peak_bytes
from olla_solvers.baselines.caching_allocator import CachingAllocatorModel
from olla_solvers.errors import ProblemError
from olla_solvers.plan import MemoryPlan, Provenance
from olla_solvers.plan_json import plan_from_json, plan_to_json
from olla_solvers.problem import ArrayKind, Offset, Operator, Problem
from olla_solvers.validate import validate

FORMAT = 5


@dataclass(frozen=True, repr=False)
class Plan:
    """A validated plan; prints as one line, and :meth:`report` as tables.

    Attributes:
        problem: the operators and arrays that were planned.
        memory: order, offsets and figures.
        baseline: what eager PyTorch needs for the same step, workspaces aside; None if nobody asked.
        timings: seconds a stage: ``capture``, ``passes`` (the choice of rewrites with them), ``order``,
            ``place``, ``emit``.
        checkpointed_operators: operators that run a second time because the model checkpoints activations.
        gradients: the arrays of gradients that are outside the buffer, or are added to what is there:
            the caller's, in a loop of their own, and those that micro-batches add up.
        gradients_in_buffer: those that are the caller's and lie in the buffer.
        baseline_with_workspaces: what eager needs with kernels' workspaces; None if these are not known.
        workspaces_recorded: True if the plan has the workspaces that a recorded run showed.
        micro_batches: how often the planned operators run in a step, with one part of the batch after the
            other. Their gradients accumulate in static arrays.
        changes: what rewrites have changed in the graph, so that backward keeps less.
        largest: the largest arrays that are alive at the peak.
        recomputed: what backward computes again, so that less is kept.
        refused: what was not done since a probe has shown that kernels do not give equal bits here.
        update: the plan of the weight update that follows several micro-batches, in the same buffer. The
            figures below are of both.
        budget: the memory budget that it was made for; None without one.
        swapped: what waits on the host meanwhile.
    """

    problem: Problem
    memory: MemoryPlan
    baseline: Baseline | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    checkpointed_operators: int = 0
    gradients: tuple[str, ...] = ()
    gradients_in_buffer: tuple[str, ...] = ()
    baseline_with_workspaces: Baseline | None = None
    workspaces_recorded: bool = False
    micro_batches: int = 1
    update: Plan | None = None
    changes: tuple[Change, ...] = ()
    largest: tuple[ArrayAtPeak, ...] = ()
    recomputed: Recomputed = field(default_factory=Recomputed)
    refused: tuple[str, ...] = ()
    budget: BudgetTerms | None = None
    swapped: Swapped = field(default_factory=Swapped)

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
    def host_bytes(self) -> int:
        """Size of the buffer on the host; 0 if nothing waits there."""
        return max(plan.memory.host_bytes for plan in self._parts)

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
    def extra_time(self) -> float:
        """Predicted time of what is computed again, and of stalls, as a share of the step's time without."""
        return self.recomputed.extra_time + self.swapped.stalled_time

    @property
    def measured_extra_time(self) -> float | None:
        """Measured time of what is computed again, as a share of the rest of the step; None if it was not.

        With a memory budget the operators of one run in the buffer are timed.
        """
        return self.recomputed.measured_extra_time

    @property
    def extra_time_bound(self) -> float:
        """Proven: no plan within the memory budget takes less extra time; 0 without a budget.

        It holds for the step after its rewrites, and without results that are written over arguments.
        """
        return 0.0 if self.budget is None else self.budget.least_extra_time

    @property
    def memory_budget_bytes(self) -> int | None:
        """The memory budget; None without one."""
        return None if self.budget is None else self.budget.budget_bytes

    @property
    def needed_bytes(self) -> int:
        """What counts in a memory budget.

        That is the buffer, outputs, and gradients outside the buffer; static bytes, if the budget includes
        them.
        """
        with_static = self.budget is not None and self.budget.includes_static
        return self.total_bytes - (0 if with_static else self.static_bytes)

    @property
    def provenance(self) -> Provenance:
        """The methods that found and proved order and placement."""
        return self.memory.provenance

    @property
    def static_bytes(self) -> int:
        """Parameters, buffers, optimizer state and inputs (of one micro-batch), alive all the time."""
        return self.problem.static_bytes - self._bytes_of(self.gradients, ArrayKind.STATIC)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are outside the buffer."""
        return self._bytes_of(self.gradients, *ArrayKind)

    def _bytes_of(self, names: Collection[str], *kinds: ArrayKind) -> int:
        chosen = frozenset(names)
        arrays = (array for array in self.problem.arrays if array.name in chosen)
        return sum(array.size_bytes for array in arrays if array.kind in kinds)

    @property
    def output_bytes(self) -> int:
        """Bytes that the step returns, allocated outside the buffer; without gradients."""
        gradients = set(self.gradients)
        outputs = (array for array in self.problem.arrays if array.kind is ArrayKind.OUTPUT)
        return sum(array.size_bytes for array in outputs if array.name not in gradients) * self.micro_batches

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
        """Static, gradient, output and buffer bytes together: all that is there at the end of the step."""
        return self.static_bytes + self.gradient_bytes + self.output_bytes + self.buffer_bytes

    @property
    def totals(self) -> Totals:
        """What the planned step needs at its worst moment, its end: the buffer stands until then.

        Without workspaces the buffer counts with the peak of its arrays.
        """
        other_bytes = self._array_peak_bytes() if self.workspaces_recorded else self.buffer_bytes
        model = CachingAllocatorModel()
        outside = [array.size_bytes for array in self.problem.arrays if array.kind is ArrayKind.OUTPUT]
        for block, size_bytes in enumerate([self.buffer_bytes, *outside]):
            model.allocate(block, size_bytes)
        kept_bytes = self._bytes_of(self.gradients_in_buffer, ArrayKind.PLANNED)
        return Totals(
            self.static_bytes,
            self.gradient_bytes + kept_bytes,
            self.output_bytes,
            other_bytes - kept_bytes,
            self.total_bytes if self.workspaces_recorded else None,
            model.reserved_bytes,
            model.fragmentation,
        )

    @property
    def eager_totals(self) -> Totals | None:
        """What eager PyTorch needs at its worst moment; None if nobody asked."""
        if self.baseline is None:
            return None
        return eager_totals(
            self.baseline,
            self.baseline_with_workspaces,
            static_bytes=self.static_bytes,
            old_gradient_bytes=self._bytes_of(self.gradients, ArrayKind.PLANNED),
        )

    def _array_peak_bytes(self) -> int:
        """Return the peak of the order without workspaces."""
        peaks = []
        for plan in self._parts:
            operators = tuple(Operator(operator.name) for operator in plan.problem.operators)
            alone = replace(plan.problem, operators=operators)
            peaks.append(peak_bytes(alone, alone.indices_of(plan.order)))
        return max(peaks)

    def __repr__(self) -> str:
        """Return the figures that matter, in one line."""
        optimal = "proven smallest" if self.is_optimal else f"at least {format_bytes(self.lower_bound_bytes)}"
        return (
            f"<Plan of {len(self.order):,} operators: peak {format_bytes(self.peak_bytes)} ({optimal}), "
            f"buffer {format_bytes(self.buffer_bytes)}>"
        )

    def report(self) -> str:
        """Return two tables: what the step needs beside eager PyTorch, and the figures of the plan."""
        return f"{format_table(self.rows_of_totals())}\n\n{format_table(self.rows())}"

    def rows_of_totals(self) -> list[tuple[str, ...]]:
        """Return the rows of the first table of :meth:`report`, the head first."""
        return rows_of_totals(self.totals, self.eager_totals)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the second table of :meth:`report`: a name and a figure with its unit."""
        gap = (self.peak_bytes - self.lower_bound_bytes) / self.peak_bytes if self.peak_bytes else 0.0
        rows = [
            ("operators", f"{len(self.order):,}"),
            ("buffer", format_bytes(self.buffer_bytes)),
            ("planned peak", format_bytes(self.peak_bytes)),
            ("lower bound", format_bytes(self.lower_bound_bytes)),
            (self._what_is_optimal, "yes, proven" if self.is_optimal else f"gap {gap:.2%}"),
            ("fragmentation", f"{self.fragmentation:.2%}"),
        ]
        if self.update is not None:
            rows += [
                ("micro-batches, each of these operators", f"{self.micro_batches:,}"),
                ("operators of the update after them", f"{len(self.update.order):,}"),
            ]
        if self.workspaces_recorded:
            rows.append(("largest workspace, in the buffer", format_bytes(self.workspace_bytes)))
        if self.checkpointed_operators:
            rows.append(("operators recomputed for checkpoints", f"{self.checkpointed_operators:,}"))
        rows += [array.row() for array in self.largest]
        rows += rows_of_changes(self.changes)
        if self.refused:
            rows.append(("not used, as kernels' bits differ here", ", ".join(self.refused)))
        if self.budget is not None:
            rows += self.budget.rows(self.needed_bytes)
        rows += self.recomputed.rows()
        rows += self.swapped.rows(self.host_bytes)
        eager = self.baseline_with_workspaces or self.baseline
        if eager is not None:
            rows.append(("eager's step", eager.source.value))
        methods = f"{self.provenance.order_found_by} / {self.provenance.order_proved_by or 'open'}"
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.timings.items())
        return [*rows, ("order found by / proved by", methods), ("seconds", stages)]

    @property
    def _what_is_optimal(self) -> str:
        """Words for what has the lower bound: other operators, or a sequence not fixed, might need less."""
        has_repetitions = self.budget is not None and self.recomputed.operators > 0
        is_chosen = has_repetitions or bool(self.swapped.arrays)
        return "smallest peak of these operators" if is_chosen else "optimal"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready dictionaries; :meth:`from_json` reads it."""
        return {
            "format": FORMAT,
            "problem": self.problem.to_json(),
            "plan": plan_to_json(self.memory),
            "baseline": _baseline_to_json(self.baseline),
            "baseline_with_workspaces": _baseline_to_json(self.baseline_with_workspaces),
            "timings": dict(self.timings),
            "checkpointed_operators": self.checkpointed_operators,
            "gradients": list(self.gradients),
            "gradients_in_buffer": list(self.gradients_in_buffer),
            "workspaces_recorded": self.workspaces_recorded,
            "micro_batches": self.micro_batches,
            "update": None if self.update is None else self.update.to_json(),
            "largest": [[array.name, array.size_bytes, array.source] for array in self.largest],
            "changes": [list(dataclasses.astuple(change)) for change in self.changes],
            "recomputed": self.recomputed.to_json(),
            "refused": list(self.refused),
            "budget": None if self.budget is None else self.budget.to_json(),
            "swapped": self.swapped.to_json(),
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
            update, budget = document["update"], document["budget"]
            plan = cls(
                problem,
                memory,
                _baseline_from_json(document["baseline"]),
                dict(document["timings"]),
                int(document["checkpointed_operators"]),
                tuple(map(str, document["gradients"])),
                tuple(map(str, document["gradients_in_buffer"])),
                _baseline_from_json(document["baseline_with_workspaces"]),
                bool(document["workspaces_recorded"]),
                int(document["micro_batches"]),
                None if update is None else cls.from_json(update),
                tuple(Change(*change) for change in document["changes"]),
                tuple(ArrayAtPeak(str(name), int(size), str(at)) for name, size, at in document["largest"]),
                Recomputed.from_json(document["recomputed"]),
                tuple(map(str, document["refused"])),
                None if budget is None else BudgetTerms(**budget),
                Swapped.from_json(document["swapped"]),
            )
        except (KeyError, TypeError) as error:
            raise ProblemError(f"the plan lacks {error}") from error
        validate(problem, memory)
        return plan

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


def _baseline_to_json(baseline: Baseline | None) -> dict[str, Any] | None:
    return None if baseline is None else baseline.to_json()


def _baseline_from_json(document: Mapping[str, Any] | None) -> Baseline | None:
    return None if document is None else Baseline.from_json(document)
