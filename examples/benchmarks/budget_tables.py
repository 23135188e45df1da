"""Shows the figures of the memory budgets' benchmark: tables in Markdown, and a plot.

What is kept of each step, by ``model batch rewrites``: ``ours`` are budget, peak, extra time, the proven
least extra time (None: proven impossible) and the proven least peak; ``published`` are peak and extra time of
each planner for each of :data:`SHARES`; ``pytorch`` the same of each knapsack's plans; ``blocks`` of
checkpoints around blocks, and their number. Extra time is a share of the step's, sizes are bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from budget_pytorch import not_dominated

from olla_solvers.recomputation.published.methods import HEURISTICS

MIB = 1 << 20

SHARES = (0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Budgets, of the peak without repetitions."""

LIMITS = (0.01, 0.03, 0.08, 0.15, 0.3)
"""Extra time."""

EXPERIMENTS = {
    "resnet50 32": (2616, 2371, 1881, 1366, 892, 503, 489),
    "vgg16 32": (2232, 2011, 1610, 1180, None, None, 1176),
    "vit_b_16 32": (3606, 3218, 2516, 1764, 1002, 444, 357),
    "gpt2 8": (6490, 6058, 5170, 4029, 3155, 2456, 2456),
    "u_net 8": (2744, 2472, 2140, 1524, 1052, 820, 818),
    "residual_network 32": (4678, 4462, 4048, 3030, 1845, 451, 373),
    "unrolled_lstm 64": (450, None, None, 427, 315, 199, 199),
}
"""MiB without repetitions, within each of :data:`LIMITS`, and at least, of earlier experiments."""

NEAR = 1e-4
"""Extra time that is taken for equal."""

MOST_SHOWN = 6
"""Plans of PyTorch's and of the papers' each that are shown of a step, beside those that beat ours."""

Figures: TypeAlias = Mapping[str, Any]


def tables(results: Mapping[str, Figures]) -> str:
    """Return all tables."""
    measured = {name: known for name, known in results.items() if "ours" in known}
    parts = [_curves(measured), _distances(measured)]
    parts += [_planners(name, known) for name, known in measured.items() if "published" in known]
    parts += [_compared(measured), _summary(measured), _seconds(measured)]
    return "\n\n".join(parts)


def compared(known: Figures) -> list[tuple[int, float, str]]:
    """Return peak and extra time of the plans that ours are compared with at equal memory, and whose.

    They are those that no other of PyTorch's beats, those that no other of the papers' does, and checkpoints.
    """
    return [plan for plans in _groups(known) for plan in plans]


def of_experiments(model: str, batch: int, rewrites: str) -> list[int]:
    """Return the memory that earlier experiments needed of the same step, for comparisons at equal memory."""
    sizes = EXPERIMENTS.get(f"{model} {batch}", ()) if rewrites == "none" else ()
    # They were rounded to whole MiB.
    return [int((size + 0.5) * MIB) for size in sizes if size]


def _groups(known: Figures) -> list[list[tuple[int, float, str]]]:
    groups = [_best(known, known.get(part, {})) for part in ("pytorch", "published")]
    if known.get("blocks"):
        peak_bytes, extra, count = known["blocks"]
        groups.append([(peak_bytes, extra, f"{count} checkpoints")])
    return groups


def _best(known: Figures, by_planner: Mapping[str, Any]) -> list[tuple[int, float, str]]:
    plans = [(tuple(plan), planner) for planner, of_it in by_planner.items() for plan in of_it]
    return [
        (*point, "/".join(dict.fromkeys(planner for plan, planner in plans if plan == point)))
        for point in not_dominated([plan for plan, _ in plans])
        if point[1] > 0 and point[0] < known["peak_bytes"]
    ]


def _is_behind(known: Figures, peak_bytes: int, extra: float) -> bool:
    return extra + NEAR < _extra_within(known, peak_bytes)


def _plans(known: Figures) -> list[tuple[int, float]]:
    """Return peak and extra time of all our plans, the step without repetitions first."""
    return [(known["peak_bytes"], 0.0), *((peak, extra) for _, peak, extra, *_ in known["ours"])]


def _extra_within(known: Figures, peak_bytes: int) -> float:
    return min((extra for peak, extra in _plans(known) if peak <= peak_bytes), default=float("inf"))


def _lowest(known: Figures, most_extra: float) -> int:
    return min(peak for peak, extra in _plans(known) if extra <= most_extra)


def _bound(known: Figures, budget_bytes: int) -> float | None:
    """Return what is proven of a budget; infinite if it is impossible, None if it was not asked for."""
    bounds = [bound for budget, _, _, bound, _ in known["ours"] if budget == budget_bytes]
    return next((float("inf") if bound is None else bound for bound in bounds), None)


def _curves(results: Mapping[str, Figures]) -> str:
    header = ("step", "0 %", *(f"≤ {limit * 100:g} %" for limit in LIMITS), "lowest", "proven")
    rows = []
    for name, known in results.items():
        before = EXPERIMENTS.get(name.removesuffix(" none"), ())
        smallest = [
            known["peak_bytes"],
            *(_lowest(known, limit) for limit in LIMITS),
            _lowest(known, float("inf")),
        ]
        cells = [
            mib(size) + (f" ({number:,})" if number else "")
            for size, number in zip(smallest, before or (None,) * len(smallest), strict=True)
        ]
        rows.append((name, *cells, mib(max(least for *_, least in known["ours"]))))
    return in_markdown(header, rows)


def _distances(results: Mapping[str, Figures]) -> str:
    rows = []
    for name, known in results.items():
        budgets = [int(share * known["peak_bytes"]) for share in SHARES]
        cells = []
        for budget in budgets:
            extra, bound = _extra_within(known, budget), _bound(known, budget)
            proven = "?" if bound is None else f"{100 * bound:.2f}"
            cells.append("impossible" if proven == "inf" else f"{_percent(extra)}/{proven}")
        rows.append((name, *cells))
    return in_markdown(("step", *(f"{share:g}" for share in SHARES)), rows)


def _planners(name: str, known: Figures) -> str:
    budgets = {share: int(share * known["peak_bytes"]) for share in SHARES}
    rows = [("ours", *(_percent(_extra_within(known, budget)) for budget in budgets.values()))]
    for planner, plans in known["published"].items():
        by_share = dict(zip(SHARES, plans, strict=True))
        rows.append((planner, *(_cell([by_share[share]], budget) for share, budget in budgets.items())))
    for knapsack, plans in known.get("pytorch", {}).items():
        rows.append((f"PyTorch, {knapsack}", *(_cell(plans, budget) for budget in budgets.values())))
    if known.get("blocks"):
        blocks = [known["blocks"][:2]]
        rows.append(("checkpoints", *(_cell(blocks, budget) for budget in budgets.values())))
    return in_markdown((name.removesuffix(" none"), *(f"{share:g}" for share in budgets)), rows)


def _compared(results: Mapping[str, Figures]) -> str:
    header = ("step", "plan", "MiB", "extra time, %", "ours, same memory", "proven", "ours, same time, MiB")
    rows = []
    for name, known in results.items():
        for peak_bytes, extra, whose in _shown(known):
            ours, bound = _extra_within(known, peak_bytes), _bound(known, peak_bytes)
            is_behind = " (behind)" if _is_behind(known, peak_bytes, extra) else ""
            proven = "" if bound is None else _percent(bound)
            lowest = mib(_lowest(known, extra))
            rows.append(
                (name, whose, mib(peak_bytes), _percent(extra), _percent(ours) + is_behind, proven, lowest)
            )
    return in_markdown(header, rows)


def _shown(known: Figures) -> list[tuple[int, float, str]]:
    """Return some of what ours are compared with: evenly spread, and all that is faster than ours."""
    shown = []
    for group in _groups(known):
        apart = max(1, (len(group) - 1) / (MOST_SHOWN - 1))
        spread = {round(step * apart) for step in range(MOST_SHOWN)}
        shown += [plan for index, plan in enumerate(group) if index in spread or _is_behind(known, *plan[:2])]
    return shown


def _summary(results: Mapping[str, Figures]) -> str:
    """Return how much less time ours take than PyTorch's plans, and how much less the bound would allow."""
    steps, lines = [], []
    for name, known in results.items():
        plans = _best(known, known.get("pytorch", {}))
        bounds = [_bound(known, peak_bytes) for peak_bytes, *_ in plans]
        pairs = [
            (1 - _extra_within(known, peak) / extra, 1 - bound / extra)
            for (peak, extra, _), bound in zip(plans, bounds, strict=True)
            if bound is not None
        ]
        if pairs:
            ours, possible = (statistics.median(column) for column in zip(*pairs, strict=True))
            steps.append((pairs, ours))
            lines.append((name, f"{len(pairs)}", f"{100 * ours:.0f} %", f"{100 * possible:.0f} %"))
    if not steps:
        return ""
    savings = [saving for pairs, _ in steps for saving, _ in pairs]
    words = (
        f"Beside PyTorch's {len(savings)} plans that no other of its own beats, ours of the same memory take "
        f"{100 * statistics.median(savings):.0f} % less extra time in the median, "
        f"{100 * statistics.median(ours for _, ours in steps):.0f} % in the median of the steps' medians."
    )
    header = (
        "step",
        "plans of PyTorch's",
        "ours: less extra time, median",
        "what the bound allows",
    )
    return f"{words}\n\n{in_markdown(header, lines)}"


def _seconds(results: Mapping[str, Figures]) -> str:
    rows = [
        (
            name,
            f"{known['operators']:,}",
            *(_of(known["seconds"], part) for part in ("capture", "published", "pytorch", "blocks", "ours")),
            f"{known['seconds']['ours'] / len(known['ours']):.1f}",
        )
        for name, known in results.items()
    ]
    header = (
        "step",
        "operators",
        "capture, s",
        "published",
        "PyTorch",
        "checkpoints",
        "ours",
        "ours, a budget",
    )
    return in_markdown(header, rows)


def _of(seconds: Mapping[str, float], part: str) -> str:
    return f"{seconds[part]:.0f}" if part in seconds else ""


def _cell(plans: Iterable[Sequence[float]], budget_bytes: int) -> str:
    """Return the extra time of the fastest plan within a budget, or in brackets the lowest peak."""
    plans = list(plans)
    within = [extra for peak, extra in plans if peak <= budget_bytes]
    return _percent(min(within)) if within else f"({mib(min(int(peak) for peak, _ in plans))})"


def _percent(extra: float) -> str:
    return "-" if extra == float("inf") else f"{100 * extra:.2f}"


def mib(size: int) -> str:
    """Return bytes in MiB."""
    return f"{size / MIB:,.0f}"


def in_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(results: Mapping[str, Figures], path: Path) -> None:
    """Draw extra time against memory, a picture for each step."""
    from matplotlib import pyplot

    steps = list(dict.fromkeys(name.rpartition(" ")[0] for name, known in results.items() if "ours" in known))
    columns = 4
    lines = -(-len(steps) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 3.5 * lines + 1), squeeze=False, layout="constrained"
    )
    labels: dict[str, Any] = {}
    for axis, step in zip(axes.flat, steps, strict=False):
        _draw(axis, results.get(f"{step} none"), results.get(f"{step} all"))
        axis.set_title(step)
        axis.set_xlabel("MiB")
        axis.set_ylabel("extra time, %")
        axis.set_ylim(0, 45)
        axis.set_xlim(left=0)
        labels |= {line.get_label(): line for line in axis.lines}
    for axis in axes.flat[len(steps) :]:
        axis.set_visible(False)
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _draw(axis: Any, plain: Figures | None, rewritten: Figures | None) -> None:
    def add(plans: Iterable[Sequence[float]], style: str, label: str, **options: Any) -> None:
        points = not_dominated([(peak, extra) for peak, extra, *_ in plans])
        axis.plot(
            [peak / MIB for peak, _ in points],
            [100 * extra for _, extra in points],
            style,
            label=label,
            **options,
        )

    if plain is not None and "ours" in plain:
        proven = [(budget, bound) for budget, _, _, bound, _ in plain["ours"] if bound is not None]
        add(proven, "k:", "proven", linewidth=1)
        add(_plans(plain), "C0.-", "ours")
        for planner, plans in plain.get("published", {}).items():
            add(plans, f"C{(4 + list(HEURISTICS).index(planner)) % 10}x", planner, markersize=4)
        pytorch = [plan for plans in plain.get("pytorch", {}).values() for plan in plans]
        add(pytorch, "C3s", "PyTorch", markersize=5) if pytorch else None
        add([plain["blocks"]], "C3*", "checkpoints", markersize=9) if plain.get("blocks") else None
    if rewritten is not None and "ours" in rewritten:
        add(_plans(rewritten), "C2.--", "ours, with rewrites")
