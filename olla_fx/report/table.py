"""Formats plain-text tables; every figure with its unit, a MiB being 2**20 bytes."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 2**20


def format_bytes(size_bytes: int) -> str:
    """Format a size, such as ``38.91 MiB``; below a tenth of a MiB in bytes."""
    return f"{size_bytes / MIB:,.2f} MiB" if size_bytes >= MIB / 10 else f"{size_bytes:,} B"


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Lay out two columns, the second aligned to the right."""
    left = max((len(name) for name, _ in rows), default=0)
    right = max((len(value) for _, value in rows), default=0)
    return "\n".join(f"{name:<{left}}  {value:>{right}}" for name, value in rows)
