"""What a plan computes again in backward, the memory budget for which it does, and what is told of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from olla_fx.report.table import format_bytes

SHOWN = 5
"""So many of the dearest and of the largest arrays are told."""


@dataclass(frozen=True, slots=True)
class RecomputedArray:
    """An array that is dropped after forward and made again for backward.

    Attributes:
        name: of the array.
        size_bytes: its size, with that of smaller arrays that the same operators make.
        seconds: of the operators that make it again.
        source: the file and line that calls the first of these; empty if that is not known.
    """

    name: str
    size_bytes: int
    seconds: float
    source: str = ""


@dataclass(frozen=True)
class Recomputed:
    """The recomputation of a plan.

    Attributes:
        arrays: those that are made again.
        operators: how many operators run once more for them.
        extra_seconds: these operators' time; within a memory budget also that of what rewrites compute again.
        step_seconds: the time of the step without them.
        costs: where the seconds come from, in words.
        saved_bytes: how much lower the peak is.
        with_workspaces: True if kernels' workspaces were known when both peaks were planned.
        measured_extra_time: what the repetitions took of a run in the buffer, as a share of what all other
            operators took in it; None before that run, and where none was timed.
    """

    arrays: tuple[RecomputedArray, ...] = ()
    operators: int = 0
    extra_seconds: float = 0.0
    step_seconds: float = 0.0
    costs: str = ""
    saved_bytes: int = 0
    with_workspaces: bool = False
    measured_extra_time: float | None = None

    @property
    def extra_time(self) -> float:
        """Return the predicted extra time as a share of the step's."""
        return self.extra_seconds / self.step_seconds if self.step_seconds else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Return rows of a plan's report: a name and a figure with its unit."""
        if not self.operators:
            return []
        lower = f"peak {format_bytes(self.saved_bytes)} lower"
        if not self.with_workspaces:
            lower = f"{lower}, workspaces apart"
        rows = [
            ("recomputed in backward", f"{self.operators:,} operators, {lower}"),
            ("extra time for it, predicted", f"{self.extra_time:.2%} of the step ({self.costs})"),
        ]
        if self.measured_extra_time is not None:
            told = f"{self.measured_extra_time:.2%} of the step (each operator timed in one run of it)"
            rows.append(("extra time for it, measured", told))
        for array in self._shown():
            made_at = f", made at {array.source}" if array.source else ""
            share = array.seconds / self.step_seconds if self.step_seconds else 0.0
            figures = f"{format_bytes(array.size_bytes)}, {share:.3%} of the time"
            rows.append((f"recomputed: {array.name}{made_at}", figures))
        return rows

    def _shown(self) -> list[RecomputedArray]:
        """Return the dearest arrays and the largest ones."""
        by_seconds = sorted(self.arrays, key=lambda array: -array.seconds)
        by_bytes = sorted(self.arrays, key=lambda array: -array.size_bytes)
        return list(dict.fromkeys((*by_seconds[:SHOWN], *by_bytes[:SHOWN])))

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready dictionaries; :meth:`from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Recomputed:
        """Read what :meth:`to_json` writes.

        Raises:
            TypeError: if the document is of another form.
        """
        fields = dict(document)
        arrays = tuple(RecomputedArray(**array) for array in fields.pop("arrays"))
        return cls(arrays, **fields)


@dataclass(frozen=True, slots=True)
class BudgetTerms:
    """The memory budget of a plan, and what is known of any plan within it.

    Attributes:
        budget_bytes: for the buffer, outputs, and gradients outside the buffer.
        includes_static: True if static arrays count, too.
        plain_bytes: what the step needs of it without recomputation.
        least_bytes: what any plan needs of it, as far as that is proven.
        least_extra_time: of any plan within it, as a share of the step's time, as far as that is proven.
    """

    budget_bytes: int
    includes_static: bool
    plain_bytes: int
    least_bytes: int = 0
    least_extra_time: float = 0.0

    @property
    def is_impossible(self) -> bool:
        """Return True if no plan is within the budget."""
        return self.least_bytes > self.budget_bytes

    def rows(self, needed_bytes: int) -> list[tuple[str, str]]:
        """Return rows of a plan's report: a name and a figure with its unit.

        Args:
            needed_bytes: of the plan.
        """
        counted = "static arrays, buffer, outputs" if self.includes_static else "buffer, outputs"
        rows = [
            (f"memory budget for {counted}", format_bytes(self.budget_bytes)),
            ("needed of it", format_bytes(needed_bytes)),
        ]
        if self.plain_bytes <= self.budget_bytes:
            return [*rows, ("recomputed for it", "nothing, the step fits")]
        rows.append(("needed without recomputation", format_bytes(self.plain_bytes)))
        if needed_bytes <= self.budget_bytes:
            told = "extra time within it, proven", f"at least {self.least_extra_time:.2%} of the step"
        else:
            missing = format_bytes(needed_bytes - self.budget_bytes)
            least = f"any plan needs at least {format_bytes(self.least_bytes)}"
            told = "memory budget kept", f"no: {missing} are missing; proven is that {least}"
        return [*rows, told]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; the constructor takes it."""
        return asdict(self)
