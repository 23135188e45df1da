"""The paper's measurements are asked for once each, resumed, and kept apart from failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import paper
import pytest
import torch
from paper_figures.jobs import Job
from paper_figures.runner import finished, run_all
from processes import run_apart

from tests.paper.jobs import all_jobs, cells, make_job

TINY = """
import torch
from torch import nn

def tiny(batch_size=1):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(batch_size, 8), torch.randn(batch_size, 4)), nn.functional.mse_loss

def broken(batch_size=1):
    raise RuntimeError("this one cannot be built")
"""


def test_the_papers_graphs_are_all_asked_for() -> None:
    steps = [job for job in all_jobs() if job.kind == "step"]
    assert len(steps) == 36
    assert {(job.batch, job.group) for job in steps if "inception_v3" in job.model} == {(2, 1), (32, 32)}
    assert {job.kind for job in all_jobs()} == {"step", "loop", "pool"}
    assert len([job for job in all_jobs() if job.kind == "pool"]) == 8
    loops = [job for job in all_jobs() if job.kind == "loop"]
    assert len({job.model for job in loops}) == 5
    assert len([job for job in loops if not job.train]) == 5


def test_on_a_gpu_other_allocator_settings_and_inductor_are_measured_too() -> None:
    jobs = all_jobs(device="cuda", inductor=True, figures=["olla-8"], models=["m"], batches=[4])
    measured = [(job.kind, job.allocator) for job in jobs]
    assert measured == [("step", ""), ("eager", "expandable_segments:True"), ("inductor", "")]
    assert len({job.path(Path()) for job in jobs}) == 3


def test_every_job_of_a_run_has_a_file_of_its_own() -> None:
    jobs = all_jobs(device="cuda", inductor=True)
    assert len({job.path(Path("out")) for job in jobs}) == len(jobs)


def test_a_graph_that_is_asked_for_twice_is_measured_once() -> None:
    jobs = all_jobs(figures=["olla-7"], models=["m:one", "m:one"], batches=[4, 4])
    assert len(jobs) == 1


def test_batches_that_a_model_raises_to_the_same_size_are_kept_apart() -> None:
    jobs = all_jobs(figures=["olla-7"], models=["torchvision:inception_v3"], batches=[1, 2])
    assert [job.batch for job in jobs] == [2, 2]
    assert len({job.path(Path("out")) for job in jobs}) == 2


def test_a_run_resumes_where_it_stopped_and_tries_failures_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(job: Job) -> dict[str, Any]:
        asked.append(job.model)
        if job.model == "m:stops" and len(asked) == 3:
            raise KeyboardInterrupt
        return {"error": "no"} if job.model == "m:fails" and len(asked) < 4 else {"peak_bytes": 1}

    jobs = [make_job("m:good"), make_job("m:fails"), make_job("m:stops"), make_job("m:last")]
    with pytest.raises(KeyboardInterrupt):
        run_all(jobs, tmp_path, measure)
    run_all(jobs, tmp_path, measure)
    assert asked == ["m:good", "m:fails", "m:stops", "m:fails", "m:stops", "m:last"]
    run_all(jobs, tmp_path, measure)
    assert len(asked) == 6


def test_results_of_other_settings_do_not_count(tmp_path: Path) -> None:
    run_all([make_job()], tmp_path, lambda _: {"peak_bytes": 1})
    assert finished(make_job(), tmp_path) is not None
    assert finished(make_job(solver="highs"), tmp_path) is None
    assert finished(make_job(time_limit=3.0), tmp_path) is None
    make_job().path(tmp_path).write_text("{ half a fi", encoding="utf-8")
    assert finished(make_job(), tmp_path) is None


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
def test_no_process_ends_a_run(program: str, expected: str) -> None:
    result = run_apart([sys.executable, "-c", program], time_limit=2 if "sleep" in program else 30)
    assert expected in result["error"]


def test_a_process_reports_and_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLA_UNWANTED", "y")
    program = (
        "import json, os; print('noise'); "
        "print(json.dumps({'seen': [os.environ.get(name) for name in ('OLLA_TEST', 'OLLA_UNWANTED')]}))"
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
    rows = {row["model"]: row for row in cells((output / "cpu/olla-7.csv").read_text(encoding="utf-8"))}
    assert float(rows["tiny"]["reduction_percent"]) > 0
    assert rows["tiny"]["eager_source"] == "recorded"
    assert rows["broken"]["reduction_percent"] == ""
    assert (output / "cpu/olla-7.png").stat().st_size > 1000
    document = json.loads((output / "cpu/step/tiny_2.json").read_text(encoding="utf-8"))
    assert document["result"]["buffer_bytes"] == document["result"]["peak_bytes"]
    assert document["result"]["binding"] == "buffer"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_asking_for_a_missing_gpu_is_one_clear_line(
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
    """Run the script with bad options and return its one line; it has measured nothing."""
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
