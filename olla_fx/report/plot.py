"""Draws a plan: time to the right, offsets upwards, one rectangle an array."""

from __future__ import annotations

from pathlib import Path

from olla_fx.report.spans import placed_spans
from olla_fx.report.table import MIB
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem


def plot_plan(problem: Problem, plan: MemoryPlan, path: str | Path) -> None:
    """Draw a plan into an image file.

    Args:
        problem: the operators and arrays.
        plan: their order and offsets.
        path: its suffix chooses the format.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install 'olla-fx[plot]'") from error
    spans = list(placed_spans(problem, plan))
    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    patches = [
        Rectangle((span.lower, offset / MIB), span.upper - span.lower, span.size_bytes / MIB)
        for span, offset in spans
    ]
    colors = [hash(span.name) % 20 for span, _ in spans]
    collection = PatchCollection(patches, cmap="tab20", edgecolor="black", linewidth=0.2)
    collection.set_array(colors)
    axes.add_collection(collection)
    axes.axhline(plan.lower_bound_bytes / MIB, color="black", linestyle="--", label="lower bound")
    axes.set(
        xlim=(0, len(plan.order)),
        ylim=(0, max(plan.buffer_bytes, 1) / MIB * 1.02),
        xlabel="timestep (operators)",
        ylabel="offset in the buffer (MiB)",
        title=f"{len(plan.order)} operators, peak {plan.peak_bytes / MIB:.2f} MiB, "
        f"buffer {plan.buffer_bytes / MIB:.2f} MiB",
    )
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)
