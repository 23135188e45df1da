"""A figure of a paper as a table: its rows, its averages beside the paper's, Markdown and CSV.

A row is what was measured of one model and batch, a dictionary. A column says how to get its figure from a
row; where that is not to be had, the cell is empty and the row's ``error`` is listed below the table.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .citations import Citation

Row = Mapping[str, Any]
Cell = float | int | str | None

NO_FIGURE = (KeyError, IndexError, TypeError, ZeroDivisionError)
"""Errors that are raised if a row lacks what a column is computed from."""

ABOUT = {
    "cpu": "CPU run: eager figures are recorded allocation traces (`recorded`: the step was run, kernels' "
    "workspaces included; `dispatched`: followed on fake tensors, without workspaces), reserved bytes and "
    "fragmentation are those of a model of the CUDA caching allocator fed with the trace. Nothing here was "
    "measured on a GPU.",
    "cuda": "CUDA run: eager figures are `torch.cuda`'s own statistics.",
}
"""Said in every table."""


def at(path: str) -> Callable[[Row], Cell]:
    """Return a function that takes a figure from a row: ``at("eager.live_bytes")``."""

    def value(row: Row) -> Cell:
        item: Any = row
        for key in path.split("."):
            item = item[key]
        return item

    return value


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: with the unit.
        name: in the CSV file, with the unit.
        value: from a row; may raise what :data:`NO_FIGURE` lists.
        decimals: shown in the table; the CSV has all.
    """

    title: str
    name: str
    value: Callable[[Row], Cell]
    decimals: int = 1

    def of(self, row: Row) -> Cell:
        """Return its figure in a row; None if there is none."""
        try:
            return self.value(row)
        except NO_FIGURE:
            return None

    def text(self, row: Row) -> str:
        """Format its figure."""
        return _text(self.of(row), self.decimals)


@dataclass(frozen=True)
class Series:
    """A column that is drawn, and averaged over the models of each batch size.

    Attributes:
        column: its name.
        average: ``mean``, ``median`` or ``max``.
        paper: what the paper has for it.
        per_group: True if batch sizes are averaged apart.
    """

    column: str
    average: str = "mean"
    paper: tuple[Citation, ...] = ()
    per_group: bool = True


@dataclass(frozen=True)
class Figure:
    """A figure or table of a paper.

    Attributes:
        key: such as ``olla-7``.
        title: what it shows, and where it is in the paper.
        kind: of the jobs that are its rows.
        columns: after model and batch.
        series: what is drawn and averaged.
        unit: of the drawn columns.
        notes: what the table's reader has to know.
        logarithmic: True if it is drawn on a logarithmic scale.
        curve: for anytime curves: the points of a row, (seconds, value).
        references: what the paper has that no column has.
    """

    key: str
    title: str
    kind: str
    columns: tuple[Column, ...]
    series: tuple[Series, ...]
    unit: str
    notes: str = ""
    logarithmic: bool = False
    curve: Callable[[Row], list[tuple[float, float]]] | None = None
    references: tuple[Citation, ...] = ()

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        return next(column for column in self.columns if column.name == name)


@dataclass(frozen=True)
class Average:
    """A column averaged over models.

    Attributes:
        label: which average, and of which batch size.
        column: what is averaged.
        value: the average.
        count: of how many models.
        cited: what the paper has for it.
    """

    label: str
    column: Column
    value: float
    count: int
    cited: tuple[Citation, ...]


AVERAGES: Mapping[str, Callable[[list[float]], float]] = {
    "mean": statistics.mean,
    "median": statistics.median,
    "max": max,
}


def averages(figure: Figure, rows: Sequence[Row]) -> list[Average]:
    """Compute the average of every series and batch size of which anything was measured."""
    results = []
    for series in figure.series:
        column = figure.column(series.column)
        groups = sorted({row["group"] for row in rows}) if series.per_group else [None]
        for group in groups:
            values = [
                value
                for row in rows
                if group is None or row["group"] == group
                if isinstance(value := column.of(row), int | float)
            ]
            label = series.average if group is None else f"{series.average}, batch {group}"
            cited = tuple(citation for citation in series.paper if citation.group in (None, group))
            if values:
                results.append(Average(label, column, AVERAGES[series.average](values), len(values), cited))
    return results


def markdown(figure: Figure, rows: Sequence[Row], device: str) -> str:
    """Format a figure as a table in Markdown: rows, averages, the paper's own figures, what is missing."""
    shown = [column for column in figure.columns if any(column.of(row) is not None for row in rows)]
    lines = [f"## {figure.title}", "", ABOUT[device], *(["", figure.notes] if figure.notes else []), ""]
    lines += _table(
        ["model", "batch", *(column.title for column in shown)],
        [[row["model"], str(row["batch"]), *(column.text(row) for column in shown)] for row in rows],
    )
    lines += ["", *_table(["", "column", "here", "of models", "in the paper"], _average_lines(figure, rows))]
    lines += [
        f"\nPaper: {citation.words}: {citation.value:g} ({citation.where})." for citation in figure.references
    ]
    lines += [
        f"\nWithout the planned buffer: {', '.join(who)}: {why}"
        for why, who in _who_has(rows, "stock_because").items()
    ]
    failed = [row for row in rows if "error" in row]
    lines += [f"\nNot measured: {row['model']} {row['batch']}: {row['error']}" for row in failed]
    lines += [f"\nMeasured with {version}." for version in _who_has(rows, "versions")]
    return "\n".join(lines) + "\n"


def _who_has(rows: Sequence[Row], name: str) -> dict[str, list[str]]:
    """Group models and batches of rows by their value of a key; several values join into one."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if value := row.get(name):
            words = value if isinstance(value, str) else ", ".join(f"{key} {value[key]}" for key in value)
            names.setdefault(words, []).append(f"{row['model']} {row['batch']}")
    return names


def _average_lines(figure: Figure, rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            average.label,
            average.column.title,
            _text(average.value, average.column.decimals),
            str(average.count),
            "; ".join(
                f"{citation.value:g} ({', '.join(filter(None, (citation.words, citation.where)))})"
                for citation in average.cited
            )
            or "-",
        ]
        for average in averages(figure, rows)
    ]


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [titles, ["---"] * len(titles), *lines]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in rows]


def csv_text(figure: Figure, rows: Sequence[Row], device: str) -> str:
    """Format a figure as comma-separated values: a row for each model and batch."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["device", "model", "batch", *(column.name for column in figure.columns), "error"])
    for row in rows:
        cells = ["" if (cell := column.of(row)) is None else cell for column in figure.columns]
        writer.writerow([device, row["model"], row["batch"], *cells, row.get("error", "")])
    return stream.getvalue()


def curves_csv(figure: Figure, rows: Sequence[Row], device: str) -> str:
    """Format the points of anytime curves."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["device", "model", "batch", "seconds", figure.unit])
    for row in rows:
        for seconds, value in points(figure, row):
            writer.writerow([device, row["model"], row["batch"], seconds, value])
    return stream.getvalue()


def points(figure: Figure, row: Row) -> list[tuple[float, float]]:
    """Return a row's anytime curve; empty if there is none."""
    try:
        return figure.curve(row) if figure.curve else []
    except NO_FIGURE:
        return []


def _text(value: Cell, decimals: int) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.{decimals}f}"
