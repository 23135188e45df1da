"""What a plan computes again in backward instead of keeping it since forward, and what is told of it."""

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
        extra_seconds: these operators' time.
        step_seconds: the time of the step without them.
        costs: where the seconds come from, in words.
        saved_bytes: how much lower the peak is.
    """

    arrays: tuple[RecomputedArray, ...] = ()
    operators: int = 0
    extra_seconds: float = 0.0
    step_seconds: float = 0.0
    costs: str = ""
    saved_bytes: int = 0

    @property
    def extra_time(self) -> float:
        """Return the predicted extra time as a share of the step's."""
        return self.extra_seconds / self.step_seconds if self.step_seconds else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Return rows of a plan's report: a name and a figure with its unit."""
        if not self.operators:
            return []
        rows = [
            (
                "recomputed in backward",
                f"{self.operators:,} operators, peak {format_bytes(self.saved_bytes)} lower",
            ),
            ("extra time for it, predicted", f"{self.extra_time:.2%} of the step ({self.costs})"),
        ]
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
