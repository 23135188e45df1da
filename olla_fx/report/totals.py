"""Compares what a planned step and an eager one need at their worst moments, row by row."""

from __future__ import annotations

from dataclasses import dataclass

from olla_fx.report.table import format_bytes

NOT_RECORDED = "not recorded"


@dataclass(frozen=True, slots=True)
class Totals:
    """The memory of one side at the moment at which it needs most, in bytes.

    Attributes:
        static_bytes: parameters, buffers, optimizer state and inputs: the caller's, alive all the time.
        gradient_bytes: the gradients that the caller gets, as far as they are there.
        output_bytes: what the step returns, as far as it is there.
        other_bytes: all other arrays.
        with_workspaces_bytes: everything, with kernels' workspaces, at the moment that is the worst with
            them; None if nothing was recorded.
        reserved_bytes: what the CUDA caching allocator would reserve for all but static arrays.
        fragmentation: share of it that is not in use at its peak, 0 to 1.
    """

    static_bytes: int
    gradient_bytes: int
    output_bytes: int
    other_bytes: int
    with_workspaces_bytes: int | None
    reserved_bytes: int
    fragmentation: float

    @property
    def without_workspaces_bytes(self) -> int:
        """Everything but kernels' workspaces."""
        return self.static_bytes + self.gradient_bytes + self.output_bytes + self.other_bytes


def rows_of_totals(planned: Totals, eager: Totals | None) -> list[tuple[str, ...]]:
    """Return a table with a column for each side, its head first.

    Args:
        planned: of the plan.
        eager: of eager PyTorch; None if nobody asked.
    """
    sides = [planned] if eager is None else [planned, eager]

    def row(name: str, attribute: str) -> tuple[str, ...]:
        values = [getattr(side, attribute) for side in sides]
        return name, *(NOT_RECORDED if value is None else format_bytes(value) for value in values)

    return [
        ("at the worst moment", "planned", "eager")[: 1 + len(sides)],
        row("static: parameters, state, inputs", "static_bytes"),
        row("gradients", "gradient_bytes"),
        row("outputs", "output_bytes"),
        row("all other arrays", "other_bytes"),
        row("all, without workspaces", "without_workspaces_bytes"),
        row("all, with workspaces", "with_workspaces_bytes"),
        row("reserved beside static (allocator model)", "reserved_bytes"),
        ("of it unused", *(f"{side.fragmentation:.2%}" for side in sides)),
    ]
