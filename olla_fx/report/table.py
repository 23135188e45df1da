"""Formats plain-text tables; every figure with its unit, a MiB being 2**20 bytes."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 2**20


def format_bytes(size_bytes: int) -> str:
    """Format a size, such as ``38.91 MiB``; below a tenth of a MiB in bytes."""
    return f"{size_bytes / MIB:,.2f} MiB" if size_bytes >= MIB / 10 else f"{size_bytes:,} B"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out columns, all but the first aligned to the right; every row has as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if column else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
