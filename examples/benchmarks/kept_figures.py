"""Keeps what a benchmark has measured in a file, so that a run that is stopped loses nothing.

Some benchmarks also begin from what is kept there: a later run adds to it, and shows all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--plot``, for a benchmark that begins from what is kept."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="where figures are kept")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into an image file")


def read(path: Path | None) -> dict[str, Any]:
    """Return the figures that are kept; none without a file, or before there is one."""
    if path is None or not path.exists():
        return {}
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def keep(path: Path | None, figures: Any) -> None:
    """Write figures to the file; do nothing without one.

    Args:
        path: of the file.
        figures: what JSON can hold.
    """
    if path is not None:
        path.write_text(json.dumps(figures, indent=1), encoding="utf-8")
