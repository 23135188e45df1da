"""What a plan lets wait on the host, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from olla_fx.report.table import format_bytes

SHOWN = 5
"""So many of the largest arrays are told."""


@dataclass(frozen=True, slots=True)
class SwappedArray:
    """An array that waits on the host.

    Attributes:
        name: of the array.
        size_bytes: its size.
        source: the file and line that calls the operator which makes it; empty if that is not known.
    """

    name: str
    size_bytes: int
    source: str = ""


@dataclass(frozen=True)
class Swapped:
    """The swapping of a plan.

    Attributes:
        arrays: those that wait on the host, one for each time.
        stalled_seconds: for which the step is predicted to wait for copies.
        step_seconds: the predicted time of its operators.
        costs: where the seconds come from, in words.
        out_bytes_per_second: of the link, from device to host.
        in_bytes_per_second: from host to device.
        saved_bytes: how much lower the peak is.
    """

    arrays: tuple[SwappedArray, ...] = ()
    stalled_seconds: float = 0.0
    step_seconds: float = 0.0
    costs: str = ""
    out_bytes_per_second: float = 0.0
    in_bytes_per_second: float = 0.0
    saved_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """The bytes that are copied each way in a step."""
        return sum(array.size_bytes for array in self.arrays)

    @property
    def stalled_time(self) -> float:
        """The predicted stalls as a share of the step's time."""
        return self.stalled_seconds / self.step_seconds if self.step_seconds else 0.0

    def rows(self, host_bytes: int) -> list[tuple[str, str]]:
        """Return rows of a plan's report: a name and a figure with its unit.

        Args:
            host_bytes: of the plan's buffer there.
        """
        if not self.arrays:
            return []
        speeds = self.out_bytes_per_second, self.in_bytes_per_second
        out, back = (f"{speed / 1e9:,.3g} GB/s" for speed in speeds)
        lower = f"peak {format_bytes(self.saved_bytes)} lower, workspaces apart"
        rows = [
            ("swapped to the host", f"{len(self.arrays):,} arrays, {lower}"),
            ("copied out and in", f"{format_bytes(self.moved_bytes)} each way, at {out} and {back}"),
            ("buffer on the host", format_bytes(host_bytes)),
            ("stalls for it, predicted", f"{self.stalled_time:.2%} of the step ({self.costs})"),
        ]
        for array in sorted(self.arrays, key=lambda array: -array.size_bytes)[:SHOWN]:
            made_at = f", made at {array.source}" if array.source else ""
            rows.append((f"swapped: {array.name}{made_at}", format_bytes(array.size_bytes)))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready dictionaries; :meth:`from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Swapped:
        """Read what :meth:`to_json` writes.

        Raises:
            TypeError: if the document is of another form.
        """
        fields = dict(document)
        arrays = tuple(SwappedArray(**array) for array in fields.pop("arrays"))
        return cls(arrays, **fields)
