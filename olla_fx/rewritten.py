"""What is told of a plan's rewrites."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from olla_fx.report.table import format_bytes
from olla_fx.rewrites import Change


def rows_of_changes(changes: Iterable[Change]) -> list[tuple[str, str]]:
    """Return rows of a plan's report, one for each rewrite: a name and a figure with its unit.

    Args:
        changes: what rewrites have done to the graph, those of one rewrite in a row.
    """
    groups = itertools.groupby(changes, lambda change: change.rewrite)
    return [(f"rewritten: {name.replace('_', ' ')}", _told(list(group))) for name, group in groups]


def _told(changes: Sequence[Change]) -> str:
    """Return what a rewrite has done."""
    told = [f"{len(changes):,} times, {format_bytes(sum(change.saved_bytes for change in changes))} not kept"]
    extra_operations = sum(change.extra_operations for change in changes)
    if extra_operations:
        told.append(f"{extra_operations / 1e9:,.3g} GFLOP more")
    if not all(change.same_bits for change in changes):
        told.append("last bits may differ from eager's")
    return ", ".join(told)
