"""``olla-fx place``: gives the spans of a file their offsets, within a capacity or as low as possible.

Exit status: 0 placed, 1 nothing found within the capacity in the time, 2 bad input, 3 proven impossible; the
last names spans that cannot fit together. Imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from typing import Any

from olla_fx.cli.common import check_folders, report
from olla_fx.progress import Progress
from olla_fx.report import format_bytes, format_table
from olla_solvers.place.search import compilation_so_far
from olla_solvers.placer import METHODS, place_with
from olla_solvers.plan import Placement, Span
from olla_solvers.spans import max_live_bytes
from olla_solvers.spans.table import placement_text, read_spans, write_placement

Rows = list[tuple[str, str]]


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what ``place`` takes besides solver, time limit and ``--json``."""
    command.add_argument("spans", metavar="SPANS.csv", help="id,lower,upper,size[,offset][,alignment]")
    command.add_argument("--capacity", type=_capacity, metavar="BYTES", help="the height that is low enough")
    command.add_argument("--method", choices=tuple(METHODS), default="auto", help="auto: all that helps")
    command.add_argument(
        "--output",
        "--out",
        metavar="FILE",
        help="write id,lower,upper,size,offset there; - for standard output",
    )


def run(parsed: argparse.Namespace) -> None:
    """Place the spans of a file.

    Args:
        parsed: the command line.
    """
    check_folders(parsed.json, parsed.output)
    spans = read_spans(parsed.spans, capacity_bytes=parsed.capacity)
    with Progress() as progress:
        progress.begin("place", f"{len(spans):,} spans")
        placement = place_with(
            spans,
            solver=parsed.solver,
            method=parsed.method,
            capacity_bytes=parsed.capacity,
            time_limit=parsed.time_limit,
            observer=partial(progress.note, "place"),
        )
    if parsed.output == "-":
        sys.stdout.write(placement_text(spans, placement.offsets))
        return
    if parsed.output:
        write_placement(parsed.output, spans, placement.offsets)
    report(format_table(_rows(spans, placement)), _document(spans, placement, parsed), parsed.json)


def _capacity(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes")
    return number


def _rows(spans: tuple[Span, ...], placement: Placement) -> Rows:
    rows = [
        ("spans", f"{len(spans):,}"),
        ("height", f"{format_bytes(placement.height_bytes)} ({placement.height_bytes:,} B)"),
        ("lower bound", f"{format_bytes(placement.lower_bound_bytes)} ({placement.lower_bound_bytes:,} B)"),
        ("found by / proved by", f"{placement.found_by} / {placement.proved_by or 'open'}"),
        ("seconds", f"{placement.seconds:.2f}"),
    ]
    if compilation_so_far() > 0:
        rows.append(("of these to load the search, or compile it once", f"{compilation_so_far():.2f}"))
    return rows


def _document(spans: tuple[Span, ...], placement: Placement, parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        "peak_bytes": max_live_bytes(spans),
        "lower_bound_bytes": placement.lower_bound_bytes,
        "buffer_bytes": placement.height_bytes,
        "is_optimal": placement.height_bytes == placement.lower_bound_bytes,
        "capacity_bytes": parsed.capacity,
        "seconds": {"place": placement.seconds},
        "solver": parsed.solver,
        "method": parsed.method,
        "provenance": {
            "place_found_by": placement.found_by,
            "place_proved_by": placement.proved_by,
            "place_solver": dataclasses.asdict(placement.solver),
        },
        "offsets": {span.name: offset for span, offset in zip(spans, placement.offsets, strict=True)},
    }
