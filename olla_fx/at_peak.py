"""An array that is alive when a plan needs most, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from olla_fx.report.table import format_bytes


@dataclass(frozen=True, slots=True)
class ArrayAtPeak:
    """An array that is alive when most memory is needed.

    Attributes:
        name: of the array.
        size_bytes: its size.
        source: the file and line that calls the operator which makes it; empty for an operator of backward.
    """

    name: str
    size_bytes: int
    source: str

    @property
    def made_at(self) -> str:
        """Where in the model it is made, in words."""
        return f"made at {self.source}" if self.source else "made in backward"

    def row(self) -> tuple[str, str]:
        """Return its row of a plan's report: a name and a figure with its unit."""
        return f"at the peak: {self.name}, {self.made_at}", format_bytes(self.size_bytes)
