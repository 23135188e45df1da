from __future__ import annotations

import csv
import io
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paper
import pytest
import torch
from paper_figures import baselines, measure, olla, others, plots, traces
from paper_figures.allocation import allocation_times
from paper_figures.figure import averages, csv_text, curves_csv, markdown
from paper_figures.jobs import FIGURES, Job, jobs_of
from paper_figures.runner import finished, rows_of, run_all
from processes import run_apart

from olla_fx.arena import AllocationEvent, EventKind
from olla_fx.models import build_model

MIB = 2**20
ALLOC, FREE = EventKind.ALLOC, EventKind.FREE
EVENTS = (
    AllocationEvent(ALLOC, 0, 100, True),
    AllocationEvent(ALLOC, 1, 200, True),
    AllocationEvent(FREE, 0, 100, True),
    AllocationEvent(ALLOC, 2, 50, True),
    AllocationEvent(FREE, 1, 200, True),
    AllocationEvent(ALLOC, 3, 70, False),
)
TINY = """
import torch
from torch import nn

def tiny(batch_size=1):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(batch_size, 8), torch.randn(batch_size, 4)), nn.functional.mse_loss

def broken(batch_size=1):
    raise RuntimeError("this one cannot be built")
"""


def job(model: str = "torchvision:alexnet", **changes: Any) -> Job:
    return Job(**{"kind": "step", "model": model, "batch": 1, "group": 1, "device": "cpu", **changes})


def all_jobs(**changes: Any) -> list[Job]:
    options: dict[str, Any] = {
        "device": "cpu", "models": None, "batches": None, "solver": "auto", "time_limit": None,
        "inductor": False, "quick": False,
    }  # fmt: skip
    return jobs_of(changes.pop("figures", FIGURES), **{**options, **changes})


def step_result(live_mib: int = 100, peak_mib: int = 60) -> dict[str, Any]:
    """Such as the measurement of a step gives, in round numbers."""
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


def row(model: str = "alexnet", group: int = 1, **changes: Any) -> dict[str, Any]:
    return {"model": model, "batch": group, "group": group, "train": True, **step_result(), **changes}


def cells(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# What is measured, and what is measured again


def test_the_papers_graphs_are_all_asked_for() -> None:
    steps = [each for each in all_jobs() if each.kind == "step"]
    assert len(steps) == 36
    assert {(each.batch, each.group) for each in steps if "inception_v3" in each.model} == {(2, 1), (32, 32)}
    assert {each.kind for each in all_jobs()} == {"step", "loop", "pool"}
    assert len([each for each in all_jobs() if each.kind == "pool"]) == 8
    loops = [each for each in all_jobs() if each.kind == "loop"]
    assert len({each.model for each in loops}) == 5
    assert len([each for each in loops if not each.train]) == 5


def test_on_a_gpu_other_allocator_settings_and_inductor_are_measured_too() -> None:
    jobs = all_jobs(device="cuda", inductor=True, figures=["olla-8"], models=["m"], batches=[4])
    found = [(each.kind, each.allocator) for each in jobs]
    assert found == [("step", ""), ("eager", "expandable_segments:True"), ("inductor", "")]
    assert len({each.path(Path()) for each in jobs}) == 3


def test_every_job_of_a_run_has_a_file_of_its_own() -> None:
    jobs = all_jobs(device="cuda", inductor=True)
    assert len({each.path(Path("out")) for each in jobs}) == len(jobs)


def test_a_graph_that_is_asked_for_twice_is_measured_once() -> None:
    jobs = all_jobs(figures=["olla-7"], models=["m:one", "m:one"], batches=[4, 4])
    assert len(jobs) == 1


def test_batches_that_a_model_raises_to_the_same_size_are_kept_apart() -> None:
    jobs = all_jobs(figures=["olla-7"], models=["torchvision:inception_v3"], batches=[1, 2])
    assert [each.batch for each in jobs] == [2, 2]
    assert len({each.path(Path("out")) for each in jobs}) == 2


def test_a_run_resumes_where_it_stopped_and_tries_failures_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(each: Job) -> dict[str, Any]:
        asked.append(each.model)
        if each.model == "m:stops" and len(asked) == 3:
            raise KeyboardInterrupt
        return {"error": "no"} if each.model == "m:fails" and len(asked) < 4 else {"peak_bytes": 1}

    jobs = [job("m:good"), job("m:fails"), job("m:stops"), job("m:last")]
    with pytest.raises(KeyboardInterrupt):
        run_all(jobs, tmp_path, measure)
    run_all(jobs, tmp_path, measure)
    assert asked == ["m:good", "m:fails", "m:stops", "m:fails", "m:stops", "m:last"]
    run_all(jobs, tmp_path, measure)
    assert len(asked) == 6


def test_results_of_other_settings_do_not_count(tmp_path: Path) -> None:
    run_all([job()], tmp_path, lambda _: {"peak_bytes": 1})
    assert finished(job(), tmp_path) is not None
    assert finished(job(solver="highs"), tmp_path) is None
    assert finished(job(time_limit=3.0), tmp_path) is None
    job().path(tmp_path).write_text("{ half a fi", encoding="utf-8")
    assert finished(job(), tmp_path) is None


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("raise ValueError('no such model')", "ValueError: no such model"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("import time; time.sleep(60)", "not done after"),
        ("print('hello')", "no JSON"),
        ("pass", "no JSON"),
    ],
)
def test_whatever_a_process_does_ends_no_run(program: str, expected: str) -> None:
    result = run_apart([sys.executable, "-c", program], time_limit=2 if "sleep" in program else 30)
    assert expected in result["error"]


def test_a_process_reports_and_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_UNWANTED", "y")
    program = (
        "import json, os; print('noise'); "
        "print(json.dumps({'seen': [os.environ.get(each) for each in ('OLLA_TEST', 'OLLA_UNWANTED')]}))"
    )
    environment = {"OLLA_TEST": "x", "OLLA_UNWANTED": None}
    assert run_apart([sys.executable, "-c", program], environment=environment) == {"seen": ["x", None]}


def test_the_script_measures_one_model_although_another_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(TINY, encoding="utf-8")
    models = [f"{tmp_path}/models.py:{name}" for name in ("broken", "tiny")]
    output = tmp_path / "out"
    arguments = ["--figures", "7", "olla-14", "--batch-sizes", "2", "--output", str(output)]
    assert paper.main([*arguments, "--models", *models]) == 1
    text = capsys.readouterr().out
    assert "Not measured: broken 2: " in text
    assert "this one cannot be built" in text
    assert "1 of 2 measured" in text
    found = {each["model"]: each for each in cells((output / "cpu/olla-7.csv").read_text(encoding="utf-8"))}
    assert float(found["tiny"]["reduction_percent"]) > 0
    assert found["tiny"]["eager_source"] == "recorded"
    assert found["broken"]["reduction_percent"] == ""
    assert (output / "cpu/olla-7.png").stat().st_size > 1000
    document = json.loads((output / "cpu/step/tiny_2.json").read_text(encoding="utf-8"))
    assert document["result"]["buffer_bytes"] == document["result"]["peak_bytes"]
    assert document["result"]["binding"] == "buffer"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_where_there_is_none_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paper.main(["--device", "cuda", "--output", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA" in line
    assert "--device cuda" in line
    assert not list(tmp_path.iterdir())


def test_an_unknown_solver_limit_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert paper.main(["--time-limit", "-1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the script says of bad options, in one line; it has measured nothing."""
    assert paper.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_that_cannot_be_written_to_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    line = refused(capsys, "--output", str(tmp_path / "file" / "results"))
    assert "--output" in line
    assert "cannot be written to (Not a directory)" in line


def test_two_models_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--models", "torchvision:vgg11", "cifar.py:vgg11", "--output", str(tmp_path))
    assert "torchvision:vgg11 and cifar.py:vgg11 are both called vgg11" in line


@pytest.mark.parametrize("option", [("--batch-sizes", "0"), ("--patience", "nan"), ("--threads", "-1")])
def test_numbers_that_make_no_sense_are_refused(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        paper.main(option)
    assert f"argument {option[0]}: '{option[1]}' is no number" in capsys.readouterr().err


def test_a_run_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paper, "run_all", stop)
    assert paper.main(["--quick", "--output", str(tmp_path)]) == 130
    assert "goes on where this one was" in capsys.readouterr().err


# Tables


def test_reordering_is_shown_beside_the_papers_averages() -> None:
    rows = [
        row("alexnet"),
        row("vgg11", **step_result(peak_mib=80)),
        row("alexnet", 32, **step_result(100, 95)),
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
def test_what_ollas_paper_reports_stands_in_its_table(key: str, expected: list[str]) -> None:
    text = markdown(paper.ALL[key], [row(), row(group=32)], "cpu")
    for each in expected:
        assert each in text
    assert "CPU run" in text


def test_a_million_iterations_less_the_planning_once() -> None:
    (found,) = cells(csv_text(olla.SECONDS_SAVED, [row()], "cpu"))
    # 20 microseconds a step; capture, order and place, but not building the native allocator.
    assert float(found["saved_seconds"]) == pytest.approx(20 - 1.75)


def test_anytime_curves_tell_when_what_was_there() -> None:
    (found,) = cells(csv_text(olla.ORDERING_CURVE, [row()], "cpu"))
    assert float(found["first_order_seconds"]) == 0.1
    assert float(found["best_order_seconds"]) == 0.4
    points = cells(curves_csv(olla.PLACEMENT_CURVE, [row()], "cpu"))
    assert [float(each["fragmentation, %"]) for each in points] == [25.0, 0.0]


def test_a_csv_has_a_row_a_model_and_a_failure_says_why() -> None:
    failure = {"model": "vgg11", "batch": 1, "group": 1, "train": True, "error": "ended by signal 9"}
    rows = [row(), failure]
    first, second = cells(csv_text(olla.TOTAL, rows, "cpu"))
    assert (first["device"], first["model"], float(first["reduction_percent"])) == ("cpu", "alexnet", 50.0)
    assert (second["reduction_percent"], second["error"]) == ("", "ended by signal 9")
    text = markdown(olla.TOTAL, rows, "cpu")
    assert "| vgg11 | 1 | - |" in text
    assert "Not measured: vgg11 1: ended by signal 9" in text
    (average,) = [each for each in averages(olla.TOTAL, rows) if each.column.name == "reduction_percent"]
    assert (average.value, average.count) == (50.0, 1)


def test_a_table_says_once_why_steps_ran_without_the_buffer() -> None:
    rows = [row(stock_because="no g++"), row("vgg11", stock_because="no g++"), row("vgg16")]
    text = markdown(olla.TOTAL, rows, "cuda")
    assert text.count("no g++") == 1
    assert "Without the planned buffer: alexnet 1, vgg11 1: no g++" in text


def test_a_table_names_every_machine_that_it_was_measured_on() -> None:
    here, there = {"torch": "2.13.0", "gpu": "A100"}, {"torch": "2.13.0", "gpu": "H100"}
    rows = [row(versions=here), row("vgg11", versions=here), row("vgg16", versions=there)]
    text = markdown(olla.TOTAL, rows, "cuda")
    assert text.count("Measured with torch 2.13.0, gpu A100.") == 1
    assert text.count("Measured with torch 2.13.0, gpu H100.") == 1


def test_other_baselines_stand_in_the_row_of_their_step(tmp_path: Path) -> None:
    needed = {"live_bytes": 1, "reserved_bytes": 2, "fragmentation": 0.5, "source": "s", "allocator": "a"}
    results = {
        "step": step_result(), "eager": {"needed": needed}, "inductor": {"error": "it cannot compile this"}
    }  # fmt: skip
    jobs = all_jobs(device="cuda", inductor=True, figures=["olla-8"], models=["m:one"], batches=[4])
    run_all(jobs, tmp_path, lambda each: results[each.kind])
    (found,) = rows_of(olla.FRAGMENTATION, jobs, tmp_path)
    assert found["expandable"] == needed
    assert found["error"] == "inductor: it cannot compile this"
    text = markdown(olla.FRAGMENTATION, [found], "cuda")
    assert "| one | 4 | recorded | 120.00 | 25.00 | 13.64 | 50.00 |" in text
    assert "CUDA run" in text


def test_sekiyamas_and_smartpools_figures_cite_their_papers() -> None:
    loop = {**row("googlenet"), "train": False, "skyline_bytes": 90 * MIB, "placed_bytes": 90 * MIB}
    text = markdown(others.SEKIYAMA_MEMORY, [loop], "cpu")
    assert "| inference | recorded |" in text
    assert "12.6" in text
    assert "49.5 (PGA abstract and §1)" in text
    timed = {**row("inception_resnet_v2"), "eager_seconds": 2.0, "planned_seconds": 1.0}
    (found,) = cells(csv_text(others.SEKIYAMA_TIME, [timed], "cpu"))
    assert (float(found["ratio"]), float(found["paper_ratio"])) == (0.5, pytest.approx(1 / 2.19))
    pool = {**row("vgg11", 100), "load_bytes": 100 * MIB, "heights": {"size-best-fit": 101 * MIB}}
    (found,) = cells(csv_text(others.SMARTPOOL, [pool], "cpu"))
    assert float(found["smartpool_ratio"]) == 1.01
    assert float(found["caching_ratio"]) == 1.2
    assert (found["paper_smartpool_ratio"], found["paper_cnmem_ratio"]) == ("1.013", "1.169")


@pytest.mark.parametrize("key", sorted(paper.ALL))
def test_every_figure_can_be_drawn_also_from_nothing(key: str, tmp_path: Path) -> None:
    failure = {"model": "vgg11", "batch": 1, "group": 1, "train": True, "error": "no"}
    for name, rows in (("full", [row(), row(group=32), failure]), ("empty", [failure])):
        path = tmp_path / f"{name}.png"
        plots.plot(paper.ALL[key], rows, "cpu", path)
        assert path.stat().st_size > 1000


def test_a_plot_names_only_what_it_shows() -> None:
    from matplotlib.figure import Figure as Canvas

    axes = Canvas().add_subplot()
    inference = {**row(), "train": False, "skyline_bytes": 90 * MIB}
    plots.draw_bars(axes, others.SEKIYAMA_MEMORY, [inference])
    labels = axes.get_legend_handles_labels()[1]
    assert "opt saves, %" in labels
    assert "opt saves in the paper, %" not in labels
    assert [each.get_text() for each in axes.get_xticklabels()] == ["alexnet 1, inference"]


# Traces and models


def test_on_a_gpu_what_was_there_before_the_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = types.SimpleNamespace(
        max_allocated_bytes=300, max_reserved_bytes=500, fragmentation=0.2, allocator_settings=""
    )
    runs: list[int] = []

    def measure(step: Callable[[], object], device: torch.device) -> types.SimpleNamespace:
        assert runs == [1], "its first run chooses kernels and makes handles"
        return baseline

    module = types.SimpleNamespace(measure_cuda_baseline=measure)
    monkeypatch.setitem(sys.modules, "olla_fx.eager.recorded_cuda", module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    needed = baselines.measured(lambda: runs.append(1), "cuda")
    # 100 of 500 bytes are wasted, which is 100 of the 400 that are this step's own.
    assert (needed.live_bytes, needed.reserved_bytes, needed.fragmentation) == (200, 400, 0.25)
    assert (needed.source, needed.allocator) == ("measured on the GPU", "default")
    assert baselines.measured_on_cuda(lambda: None, 50).live_bytes == 250


@pytest.mark.parametrize(("device", "calls_before"), [("cpu", 1), ("cuda", 2)])
def test_no_step_is_timed_that_is_recorded(
    monkeypatch: pytest.MonkeyPatch, device: str, calls_before: int
) -> None:
    case = build_model("torch:transformer-1", batch_size=1, train=False)
    calls: list[str] = []

    def paired(eager: Callable[[], object], planned: Callable[[], object], _: bool) -> tuple[float, float]:
        calls.append("timed")
        return 2.0, 1.0

    monkeypatch.setattr(measure, "paired", paired)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = measure.times(case, None, lambda *_: calls.append("settles"), device)
    assert calls == ["settles"] * calls_before + ["timed"] * measure.PAIRS
    assert found == {"eager_seconds": 2.0, "planned_seconds": 1.0}


def test_a_trace_becomes_rectangles_in_eagers_order() -> None:
    spans = traces.spans_of(EVENTS, alignment=64)
    found = [(each.name, each.lower, each.upper, each.size_bytes) for each in spans]
    assert found == [("0", 0, 2, 128), ("1", 1, 4, 256), ("2", 3, 6, 64), ("3", 5, 6, 128)]
    assert traces.live_peak_bytes(EVENTS) == 300


def test_allocations_are_made_again_but_not_those_of_other_threads() -> None:
    times = allocation_times(EVENTS, "cpu")
    assert times.requests == 3
    assert times.stock_seconds > 0
    assert times.served_seconds > 0


def test_a_step_that_does_not_fit_is_followed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_model("torch:transformer-1", batch_size=1)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    before = [each.clone() for each in case.model.parameters()]
    monkeypatch.setattr(traces, "available_bytes", lambda: 2**30)
    events, source = traces.trace(case, optimizer, run=True)
    assert source == "dispatched"
    assert events
    assert all(map(torch.equal, before, case.model.parameters()))


@pytest.mark.parametrize(
    ("model", "shape", "millions"),
    [
        ("seq2seq.py:seq2seq", (50, 2, 40_000), 173.3),
        ("cifar.py:resnet18", (2, 10), 11.2),
        ("cifar.py:vgg16", (2, 10), 15.0),
    ],
)
def test_the_papers_models_have_their_shapes(model: str, shape: tuple[int, ...], millions: float) -> None:
    case = build_model(job(model).model_name, batch_size=2, device="meta")
    *inputs, _ = case.inputs
    assert tuple(case.model(*inputs).shape) == shape
    count = sum(each.numel() for each in case.model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.05)


def test_inception_resnets_stages_have_the_papers_sizes() -> None:
    case = build_model(job("inception_resnet.py:inception_resnet_v2").model_name, batch_size=2, device="meta")
    x, sizes = case.inputs[0], []
    for stage in case.model:
        x = stage(x)
        sizes.append(tuple(x.shape[1:]))
    # Figures 3 and 15 to 19 of its paper: the stem, five blocks, a reduction, ten, a reduction, five.
    blocks = [(384, 35, 35)] * 6 + [(1152, 17, 17)] * 11 + [(2144, 8, 8)] * 6
    assert sizes == [*blocks, (2144, 1, 1), (2144,), (2144,), (1000,)]


def test_recurrent_layers_are_left_to_pytorchs_own_kernels() -> None:
    """Of eager, too: what cuDNN does with them cannot be captured."""
    model = torch.nn.LSTM(3, 4)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.backends.cudnn.flags(enabled=True):
        measure.leave_recurrent_layers_to_pytorch(torch.nn.Linear(3, 4))
        assert torch.backends.cudnn.enabled
        measure.leave_recurrent_layers_to_pytorch(model)
        assert not torch.backends.cudnn.enabled
    assert len({each.untyped_storage().data_ptr() for each in model.parameters()}) == 4
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), weights)


def test_seq2seq_writes_a_hundred_words_when_it_does_not_train() -> None:
    case = build_model(job("seq2seq.py:seq2seq").model_name, batch_size=2, train=False, device="meta")
    assert tuple(case.model(*case.inputs).shape) == (100, 2)
