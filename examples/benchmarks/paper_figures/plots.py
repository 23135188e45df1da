"""Draws the figures: bars a model, or anytime curves, with the paper's averages as dashed lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .figure import Figure, Row, points

INSTALL = "pip install 'olla-fx[plot]'"


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def plot(figure: Figure, rows: Sequence[Row], device: str, path: Path) -> None:
    """Draw a figure into an image file.

    Args:
        figure: what to draw.
        rows: its rows; those without figures are left out.
        device: ``cpu`` or ``cuda``, said in the title.
        path: its suffix chooses the format.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(13, 6), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    what = "CPU: recorded traces, model of the caching allocator" if device == "cpu" else "CUDA, measured"
    axes.set_title(f"{figure.title}\n({what})")
    if figure.curve:
        _draw_curves(axes, figure, rows)
    else:
        draw_bars(axes, figure, rows)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", ncols=2)
    canvas.savefig(path, dpi=120)


def draw_bars(axes: Any, figure: Figure, rows: Sequence[Row]) -> None:
    """Draw one group of bars for each row and averaged column."""
    columns = [figure.column(name) for name in dict.fromkeys(series.column for series in figure.series)]
    drawn = [column for column in columns if any(column.of(row) is not None for row in rows)]
    width = 0.8 / max(1, len(drawn))
    for number, column in enumerate(drawn):
        values = [column.of(row) for row in rows]
        places = [at + width * (number - (len(drawn) - 1) / 2) for at in range(len(rows))]
        bars = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        axes.bar([at for at, _ in bars], [value for _, value in bars], width, label=column.title)
    _draw_references(axes.axhline, figure)
    names = [f"{row['model']} {row['batch']}{'' if row['train'] else ', inference'}" for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=75)
    axes.set_ylabel(figure.unit)
    if figure.logarithmic:
        axes.set_yscale("log")
    elif "ratio" in figure.unit or "/" in figure.unit:
        axes.axhline(1, color="black", linewidth=0.8)


def _draw_references(line: Callable[..., Any], figure: Figure) -> None:
    """Draw the paper's figures as dashed lines."""
    cited = dict.fromkeys(
        citation for series in figure.series for citation in (*series.paper, *figure.references)
    )
    for number, citation in enumerate(cited):
        group = "" if citation.group is None else f", batch {citation.group}"
        line(
            citation.value, color=f"C{number + 5}", linestyle="--", linewidth=1,
            label=f"paper, {citation.words}{group}: {citation.value:g}",
        )  # fmt: skip


def _draw_curves(axes: Any, figure: Figure, rows: Sequence[Row]) -> None:
    """Draw steps over time, on a logarithmic axis; curves that never change would only hide the others."""
    for row in rows:
        curve = points(figure, row)
        if len(curve) < 2:
            continue
        curve = [*curve, (max(curve[-1][0] * 1.5, curve[-1][0] + 1e-3), curve[-1][1])]
        axes.step(
            [seconds for seconds, _ in curve], [value for _, value in curve], where="post",
            label=f"{row['model']} {row['batch']}",
        )  # fmt: skip
    _draw_references(axes.axvline, figure)
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
    axes.set_ylabel(figure.unit)
