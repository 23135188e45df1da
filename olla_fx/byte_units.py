"""Units of bytes in what users write."""

from __future__ import annotations

from collections.abc import Mapping

UNITS: Mapping[str, int] = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
}  # fmt: skip
"""Bytes of each unit, in lower case."""
