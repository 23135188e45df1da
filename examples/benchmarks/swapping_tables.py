"""Shows the figures of the benchmark of swapping: tables in markdown, and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from budget_tables import in_markdown
from paper_figures.citations import SMARTPOOL_LOAD_MB

Figures: TypeAlias = Mapping[str, Any]

MB = 10**6

REDUCTION = {
    "resnet18": 20.7, "resnet34": 24.8, "resnet50": 34.2, "resnet101": 32.4,
    "vgg11": 27.0, "vgg13": 29.3, "vgg16": 30.9, "vgg19": 28.5,
}  # fmt: skip
"""The paper's Table II: reduction of the load without overhead, in per cent."""

PAPER_S = "gtx-1080-ti 16"
"""The paper's device and link, as they are called in the file of figures."""

_TITLE = "Load reduced without extra time (Table II), in per cent"

METHODS = ("aoa", "doa", "wdoa", "swdoa", "combined", "least-recently-used", "longest-reused")

OURS = "joint"
"""This project's own planner, in its own orders and eager's, which may also repeat operators."""


def tables(results: Figures) -> str:
    """Return what is known as tables."""
    parts = []
    if "table-2" in results:
        parts += [_table_2(results["table-2"]), _other_links(results["table-2"])]
    if "figure-9" in results:
        parts += [_figure_9(key, rows) for key, rows in results["figure-9"].items()]
    if "figure-11" in results:
        parts.append(_figure_11(results["figure-11"]))
    return "\n\n".join(parts)


def _table_2(known: Figures) -> str:
    facts = ("model", "iteration, ms", "load, MB", "paper's, MB", "load_min, %")
    rows = []
    for model, figures in _of(known, PAPER_S).items():
        rows.append(
            (
                model,
                f"{1000 * figures['seconds']:.1f}",
                f"{figures['peak'] / MB:,.0f}",
                f"{SMARTPOOL_LOAD_MB[model]:,}",
                f"{100 * (1 - figures['least'] / figures['peak']):.1f}",
                *(_reduced(figures, method) for method in METHODS),
                f"{REDUCTION[model]}",
                _reduced(figures, OURS),
            )
        )
    return f"{_TITLE}, {PAPER_S} GB/s\n\n{in_markdown((*facts, *METHODS, 'paper', OURS), rows)}"


def _other_links(known: Figures) -> str:
    places = list(dict.fromkeys(key.partition(" ")[2] for key in known))
    by_place = {place: _of(known, place) for place in places}
    rows = [
        (
            model,
            *(_both(figures[model]) if model in figures else "-" for figures in by_place.values()),
            f"{REDUCTION[model]}",
        )
        for model in REDUCTION
        if any(model in figures for figures in by_place.values())
    ]
    header = ("model", *(f"{place} GB/s" for place in places), "paper")
    return f"{_TITLE}, all devices and links, combined scores / joint\n\n{in_markdown(header, rows)}"


def _of(known: Figures, place: str) -> Figures:
    """Return the figures of a device and link by model."""
    parts = {key.partition(" ")[::2]: figures for key, figures in known.items()}
    return {model: parts[model, place] for model in REDUCTION if (model, place) in parts}


def _both(figures: Figures) -> str:
    return f"{_reduced(figures, 'combined')} / {_reduced(figures, OURS)}"


def _reduced(figures: Figures, method: str) -> str:
    if method not in figures["load"]:
        return "-"
    return f"{100 * (1 - figures['load'][method] / figures['peak']):.1f}"


def _figure_9(key: str, known: list[Any]) -> str:
    methods = METHODS[:5]
    rows = [(f"{share:.2f}", *(f"{100 * extra[method]:.2f}" for method in methods)) for share, extra in known]
    title = f"Extra time of {key} GB/s in per cent, by the limit as a share of the peak (Figure 9)"
    return f"{title}\n\n{in_markdown(('limit', *methods), rows)}"


def _figure_11(known: Figures) -> str:
    shares = sorted({point[0] for figures in known.values() for point in figures["rows"]["combined"]})
    rows = []
    for key, figures in known.items():
        alone = _less(figures["pool"], figures["caching"])
        for method, points in figures["rows"].items():
            cells = {
                share: f"{_less(footprint, figures['caching'])} at {100 * extra:.1f}"
                for share, footprint, extra in points
            }
            rows.append((key.split()[0], method, alone, *(cells.get(share, "-") for share in shares[::-1])))
    title = (
        "Footprint less than the caching allocator's, at so much extra time, in per cent, by the limit as a "
        "share of the peak load (Figure 11)"
    )
    header = ("model", "method", "SmartPool alone", *(f"{share:.2f}" for share in shares[::-1]))
    return f"{title}\n\n{in_markdown(header, rows)}"


def _less(footprint: int, others: int) -> str:
    return f"{100 * (1 - footprint / others):.0f}"


def plot(results: Figures, path: Path) -> None:
    """Draw Figures 8, 9 and 11."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 4, figsize=(18, 12), squeeze=False, layout="constrained")
    first, second, *others = axes.flat
    _draw_loads(first, results.get("figure-8", {}))
    _draw_scores(second, results.get("figure-9", {}))
    known = results.get("figure-11", {})
    for axis, (key, figures) in zip(others, known.items(), strict=False):
        _draw_footprints(axis, key.split()[0], figures)
    for axis in others[len(known) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def _draw_loads(axis: Any, known: Figures) -> None:
    for key, figures in known.items():
        milliseconds = [1000 * end for end in figures["ends"]]
        for name, load in figures["loads"].items():
            axis.step(milliseconds, [size_bytes / MB for size_bytes in load], label=name, linewidth=1)
        axis.set_title(f"Figure 8: load of {key.split()[0]}")
    axis.set_xlabel("ms of computing")
    axis.set_ylabel("MB")
    axis.legend()


def _draw_scores(axis: Any, known: Figures) -> None:
    for key, rows in known.items():
        for method in METHODS[:5]:
            points = [(100 * share, 100 * extra[method]) for share, extra in rows]
            style = "k.-" if method == "combined" else ".--"
            axis.plot(*zip(*points, strict=True), style, label=method, linewidth=1)
        axis.set_title(f"Figure 9: {key.split()[0]}")
    axis.set_xlabel("limit, % of the peak load")
    axis.set_ylabel("extra time, %")
    axis.legend()


def _draw_footprints(axis: Any, model: str, figures: Figures) -> None:
    for method, points in figures["rows"].items():
        reduced = [100 * (1 - footprint / figures["caching"]) for _, footprint, _ in points]
        axis.plot(reduced, [100 * extra for *_, extra in points], ".-", label=method)
    axis.set_title(f"Figure 11: {model}")
    axis.set_xlabel("footprint less than the caching allocator's, %")
    axis.set_ylabel("extra time, %")
    axis.set_ylim(0, 100)
    axis.legend()
