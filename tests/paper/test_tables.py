"""Tables and plots show measurements beside the figures of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paper
import pytest
from paper_figures import olla, others, plots
from paper_figures.figure import averages, csv_text, curves_csv, markdown
from paper_figures.runner import rows_of, run_all

from tests.paper.jobs import all_jobs, cells

MIB = 2**20


def step_result(live_mib: int = 100, peak_mib: int = 60) -> dict[str, Any]:
    """Return a measurement of a step in round numbers."""
    return {
        "eager": {
            "live_bytes": live_mib * MIB, "reserved_bytes": 120 * MIB, "fragmentation": 0.25,
            "source": "recorded", "allocator": "model",
        },
        "allocation": {"requests": 40, "stock_seconds": 5e-5, "served_seconds": 3e-5},
        "operators": 10, "arrays": 8, "static_bytes": 100 * MIB, "output_bytes": 0, "workspace_bytes": 0,
        "peak_bytes": peak_mib * MIB, "lower_bound_bytes": peak_mib * MIB, "buffer_bytes": peak_mib * MIB,
        "fragmentation": 0.0, "timings": {"capture": 1.0, "order": 0.5, "place": 0.25, "build": 99.0},
        "order_found_by": "greedy", "order_proved_by": None, "place_found_by": "skyline",
        "place_proved_by": "live bytes",
        "order_progress": [[0.1, 90 * MIB, 0, "captured"], [0.4, peak_mib * MIB, peak_mib * MIB, "greedy"]],
        "place_progress": [[0.1, 80 * MIB, 0, "a"], [0.2, peak_mib * MIB, peak_mib * MIB, "b"]],
    }  # fmt: skip


def make_row(model: str = "alexnet", group: int = 1, **changes: Any) -> dict[str, Any]:
    return {"model": model, "batch": group, "group": group, "train": True, **step_result(), **changes}


def test_reordering_is_shown_beside_the_papers_averages() -> None:
    rows = [
        make_row("alexnet"),
        make_row("vgg11", **step_result(peak_mib=80)),
        make_row("alexnet", 32, **step_result(100, 95)),
    ]
    text = markdown(olla.REORDERING, rows, "cpu")
    assert "| alexnet | 1 | recorded | 100.00 | 60.00 | 60.00 | 40.00 | 100.00 | 20.00 | open |" in text
    assert "| mean, batch 1 | reduction, % | 30.00 | 2 | 22.5 (average, OLLA §5.3, Figure 7) |" in text
    assert "| mean, batch 32 | reduction, % | 5.00 | 1 | 10.1 (average, OLLA §5.3, Figure 7) |" in text
    assert "| max | reduction, % | 40.00 | 3 | 38 (largest, OLLA §5.3) |" in text
    assert "Nothing here was measured on a GPU." in text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("olla-8", ["7.9 (average, OLLA §5.4, Figure 8)", "26.1 (average"]),
        ("olla-9", ["1.4 (median, ± 0.2, OLLA §5.5", "5.2 (longest but EfficientNet's"]),
        ("olla-10", ["120 (EfficientNet", "300 (EfficientNet"]),
        ("olla-11", ["5.7 (median, ± 0.6, OLLA §5.6"]),
        ("olla-12", ["300 (GoogLeNet and EfficientNet"]),
        ("olla-13", ["30.4 (average, OLLA §5.7", "36.1 (average, OLLA §5.7"]),
        ("olla-14", ["300 (average: 5 minutes, OLLA §5.7"]),
    ],
)
def test_figures_that_ollas_paper_reports_stand_in_its_table(key: str, expected: list[str]) -> None:
    text = markdown(paper.ALL[key], [make_row(), make_row(group=32)], "cpu")
    for phrase in expected:
        assert phrase in text
    assert "CPU run" in text


def test_a_million_iterations_less_the_planning_once() -> None:
    (row,) = cells(csv_text(olla.SECONDS_SAVED, [make_row()], "cpu"))
    # 20 microseconds a step; capture, order and place, but not building the native allocator.
    assert float(row["saved_seconds"]) == pytest.approx(20 - 1.75)


def test_anytime_curves_tell_the_time_of_the_first_and_the_best() -> None:
    (row,) = cells(csv_text(olla.ORDERING_CURVE, [make_row()], "cpu"))
    assert float(row["first_order_seconds"]) == 0.1
    assert float(row["best_order_seconds"]) == 0.4
    points = cells(curves_csv(olla.PLACEMENT_CURVE, [make_row()], "cpu"))
    assert [float(point["fragmentation, %"]) for point in points] == [25.0, 0.0]


def test_a_csv_has_a_row_a_model_and_a_failure_says_why() -> None:
    failure = {"model": "vgg11", "batch": 1, "group": 1, "train": True, "error": "ended by signal 9"}
    rows = [make_row(), failure]
    first, second = cells(csv_text(olla.TOTAL, rows, "cpu"))
    assert (first["device"], first["model"], float(first["reduction_percent"])) == ("cpu", "alexnet", 50.0)
    assert (second["reduction_percent"], second["error"]) == ("", "ended by signal 9")
    text = markdown(olla.TOTAL, rows, "cpu")
    assert "| vgg11 | 1 | - |" in text
    assert "Not measured: vgg11 1: ended by signal 9" in text
    (average,) = (a for a in averages(olla.TOTAL, rows) if a.column.name == "reduction_percent")
    assert (average.value, average.count) == (50.0, 1)


def test_a_table_says_once_why_steps_ran_without_the_buffer() -> None:
    rows = [make_row(stock_because="no g++"), make_row("vgg11", stock_because="no g++"), make_row("vgg16")]
    text = markdown(olla.TOTAL, rows, "cuda")
    assert text.count("no g++") == 1
    assert "Without the planned buffer: alexnet 1, vgg11 1: no g++" in text


def test_a_table_names_every_machine_that_it_was_measured_on() -> None:
    first, second = {"torch": "2.13.0", "gpu": "A100"}, {"torch": "2.13.0", "gpu": "H100"}
    rows = [make_row(versions=first), make_row("vgg11", versions=first), make_row("vgg16", versions=second)]
    text = markdown(olla.TOTAL, rows, "cuda")
    assert text.count("Measured with torch 2.13.0, gpu A100.") == 1
    assert text.count("Measured with torch 2.13.0, gpu H100.") == 1


def test_other_baselines_stand_in_the_row_of_their_step(tmp_path: Path) -> None:
    needed = {"live_bytes": 1, "reserved_bytes": 2, "fragmentation": 0.5, "source": "s", "allocator": "a"}
    results = {
        "step": step_result(), "eager": {"needed": needed}, "inductor": {"error": "it cannot compile this"}
    }  # fmt: skip
    jobs = all_jobs(device="cuda", inductor=True, figures=["olla-8"], models=["m:one"], batches=[4])
    run_all(jobs, tmp_path, lambda job: results[job.kind])
    (row,) = rows_of(olla.FRAGMENTATION, jobs, tmp_path)
    assert row["expandable"] == needed
    assert row["error"] == "inductor: it cannot compile this"
    text = markdown(olla.FRAGMENTATION, [row], "cuda")
    assert "| one | 4 | recorded | 120.00 | 25.00 | 13.64 | 50.00 |" in text
    assert "CUDA run" in text


def test_sekiyamas_and_smartpools_figures_cite_their_papers() -> None:
    loop = {**make_row("googlenet"), "train": False, "skyline_bytes": 90 * MIB, "placed_bytes": 90 * MIB}
    text = markdown(others.SEKIYAMA_MEMORY, [loop], "cpu")
    assert "| inference | recorded |" in text
    assert "12.6" in text
    assert "49.5 (PGA abstract and §1)" in text
    timed = {**make_row("inception_resnet_v2"), "eager_seconds": 2.0, "planned_seconds": 1.0}
    (row,) = cells(csv_text(others.SEKIYAMA_TIME, [timed], "cpu"))
    assert (float(row["ratio"]), float(row["paper_ratio"])) == (0.5, pytest.approx(1 / 2.19))
    pool = {**make_row("vgg11", 100), "load_bytes": 100 * MIB, "heights": {"size-best-fit": 101 * MIB}}
    (row,) = cells(csv_text(others.SMARTPOOL, [pool], "cpu"))
    assert float(row["smartpool_ratio"]) == 1.01
    assert float(row["caching_ratio"]) == 1.2
    assert (row["paper_smartpool_ratio"], row["paper_cnmem_ratio"]) == ("1.013", "1.169")


@pytest.mark.parametrize("key", sorted(paper.ALL))
def test_every_figure_can_be_drawn_also_from_nothing(key: str, tmp_path: Path) -> None:
    failure = {"model": "vgg11", "batch": 1, "group": 1, "train": True, "error": "no"}
    for name, rows in (("full", [make_row(), make_row(group=32), failure]), ("empty", [failure])):
        path = tmp_path / f"{name}.png"
        plots.plot(paper.ALL[key], rows, "cpu", path)
        assert path.stat().st_size > 1000


def test_a_plot_names_only_what_it_shows() -> None:
    from matplotlib.figure import Figure as Canvas

    axes = Canvas().add_subplot()
    inference = {**make_row(), "train": False, "skyline_bytes": 90 * MIB}
    plots.draw_bars(axes, others.SEKIYAMA_MEMORY, [inference])
    labels = axes.get_legend_handles_labels()[1]
    assert "opt saves, %" in labels
    assert "opt saves in the paper, %" not in labels
    assert [label.get_text() for label in axes.get_xticklabels()] == ["alexnet 1, inference"]
