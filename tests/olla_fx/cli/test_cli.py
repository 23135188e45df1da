from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import olla_fx
from olla_fx.cli import main as cli
from olla_fx.cli import order as cli_order
from olla_solvers.problem import Array, Operator, Problem

FACTORY = """
import torch
from torch import nn

def mlp(batch_size):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, (torch.randn(batch_size, 32), torch.randint(4, (batch_size,))), nn.functional.cross_entropy

def words(batch_size):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2048))
    tokens = torch.randint(50, (batch_size,))
    return model, (tokens, tokens), nn.functional.cross_entropy

def branching():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
        def forward(self, x):
            y = self.linear(x)
            return y if y.sum() > 0 else -y
    return Branching(), (torch.randn(2, 2), torch.randn(2, 2)), nn.functional.mse_loss
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    path = tmp_path / "factory.py"
    path.write_text(FACTORY, encoding="utf-8")
    return path


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """As listed it needs 45 bytes; with the branch over ``large`` first, 41."""
    operators = tuple(Operator(name) for name in ("start", "small", "large", "shrink", "join"))
    arrays = (
        Array("a", 10, 0, (1, 2)),
        Array("small", 5, 1, (4,)),
        Array("large", 30, 2, (3,)),
        Array("shrunk", 1, 3, (4,)),
        Array("sum", 1, 4),
    )
    path = tmp_path / "graph.json"
    Problem(operators, arrays).save(path)
    return path


def plan_json(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert cli.main(["plan", *arguments, "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def test_plan_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = plan_json(
        tmp_path, "--model", "torchvision:resnet18", "--image-size", "64", "--batch-size", "2", "--train",
        "--optimizer", "sgd",
    )  # fmt: skip
    assert result["buffer_bytes"] >= result["peak_bytes"] >= result["lower_bound_bytes"] > 0
    assert result["is_optimal"] == (result["peak_bytes"] == result["lower_bound_bytes"])
    assert result["static_bytes"] > 40 * 2**20
    assert result["output_bytes"] > 0
    assert {"capture", "order", "place"} <= set(result["seconds"])
    assert result["solver"] == "auto"
    assert result["provenance"]["order_found_by"]
    assert result["baseline"]["live_peak_bytes"] > result["peak_bytes"]
    assert len(set(result["order"])) == len(result["order"]) > 100
    assert all(0 <= offset < result["buffer_bytes"] for offset in result["offsets"].values())
    printed = capsys.readouterr()
    for row in ("planned peak", "buffer", "lower bound", "all, without workspaces"):
        assert row in printed.out
    assert printed.err == ""


def test_the_time_of_another_device_counts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "torchvision:resnet18", "--image-size", "64", "--batch-size", "32"]
    arguments += ["--no-baseline", "--recompute", "0.05"]
    for profile in ("a100", "h200"):
        assert cli.main([*arguments, "--device-profile", profile]) == 0
        assert f"estimated for {profile}" in capsys.readouterr().out


def test_recomputation_without_a_backward(factory_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", f"{factory_file}:mlp", "--inference", "--recompute", "0.1"]
    assert cli.main(arguments) == 2
    assert "--recompute is for backward" in capsys.readouterr().err


def test_a_memory_budget(tmp_path: Path, factory_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "torchvision:resnet18", "--image-size", "64", "--batch-size", "32", "--no-baseline")
    device = ("--device-profile", "a100")
    planned = plan_json(tmp_path, *model, *device, "--memory-budget", "40MiB")
    assert planned["needed_bytes"] <= planned["memory_budget_bytes"] == 40 << 20
    assert 0 < planned["extra_time_bound"] <= planned["extra_time"]
    assert "memory budget for buffer, outputs" in capsys.readouterr().out
    assert not planned["swapped"]["arrays"]
    swapped = plan_json(tmp_path, *model, *device, "--memory-budget", "40MiB", "--link", "100GB/s")
    assert swapped["extra_time"] < planned["extra_time"]
    assert swapped["swapped"]["arrays"]
    assert swapped["host_bytes"]
    static = plan_json(
        tmp_path, *model, *device, "--memory-budget", "1GiB", "--memory-budget-includes", "static"
    )
    assert static["needed_bytes"] == static["total_bytes"] > planned["needed_bytes"]
    impossible = ["plan", "--model", f"{factory_file}:mlp", "--no-baseline", "--memory-budget", "64 B"]
    assert cli.main(impossible) == 3
    assert "no plan within the memory budget of 64 B was found" in capsys.readouterr().err
    assert cli.main([*impossible[:-1], "plenty"]) == 2
    assert "memory_budget is bytes above 0" in capsys.readouterr().err


def test_a_link_to_the_host(tmp_path: Path, factory_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "torchvision:resnet18", "--image-size", "64", "--batch-size", "32", "--no-baseline")
    budget = ("--device-profile", "a100", "--memory-budget", "40MiB")
    planned = plan_json(tmp_path, *model, *budget, "--link", "64GB/s")
    assert "swapped to the host" in capsys.readouterr().out
    arrays = planned["swapped"]["arrays"]
    assert len(planned["host_offsets"]) == len(arrays) > 0
    assert 0 < planned["host_bytes"] <= sum(array["size_bytes"] for array in arrays) + 64 * len(arrays)
    assert cli.main(["plan", "--model", f"{factory_file}:mlp", "--link", "64GB/s"]) == 2
    assert "which is done within a memory_budget: give that" in capsys.readouterr().err


def test_inference_needs_less_than_training(tmp_path: Path) -> None:
    model = ("--model", "torchvision:resnet18", "--image-size", "64", "--no-baseline")
    inference = plan_json(tmp_path, *model, "--inference")
    training = plan_json(tmp_path, *model)
    assert inference["baseline"] is None
    assert 0 < inference["peak_bytes"] < training["peak_bytes"]
    assert inference["static_bytes"] <= training["static_bytes"]


def test_a_loss_in_chunks(tmp_path: Path, factory_file: Path) -> None:
    model = ("--model", f"{factory_file}:words", "--batch-size", "64", "--no-baseline")
    whole, chunks = plan_json(tmp_path, *model), plan_json(tmp_path, *model, "--loss-chunks", "8")
    assert chunks["peak_bytes"] < 0.6 * whole["peak_bytes"]
    (change,) = (change for change in chunks["changes"] if change["rewrite"] == "chunked_loss")
    assert change["extra_operations"] == 2 * 64 * 8 * 2048
    assert change["same_bits"]


@pytest.mark.parametrize("name", ["transformers:gpt2", "transformers:llama", "transformers:xlm-roberta"])
def test_text_models_are_planned(tmp_path: Path, name: str) -> None:
    result = plan_json(tmp_path, "--model", name, "--batch-size", "2", "--tokens", "8", "--solver", "none")
    assert 0 < result["peak_bytes"] < result["baseline"]["live_peak_bytes"]


def test_a_loop_of_ones_own_gets_its_gradients(
    tmp_path: Path, factory_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = plan_json(tmp_path, "--model", f"{factory_file}:mlp", "--own-loop")
    assert result["gradient_bytes"] == 0, "they lie in the buffer"
    assert result["buffer_bytes"] >= 4 * (32 * 64 + 64 + 64 * 4) + 64
    assert result["baseline"]["gradient_bytes"] == 4 * (32 * 64 + 64 + 64 * 4 + 4)
    assert result["total_bytes"] == sum(
        result[f"{part}_bytes"] for part in ("static", "gradient", "output", "buffer")
    )
    assert "gradients" in capsys.readouterr().out


def test_a_batch_that_would_not_fit_is_planned(tmp_path: Path) -> None:
    result = plan_json(tmp_path, "--model", "torchvision:alexnet", "--batch-size", "1000000", "--no-baseline")
    assert result["peak_bytes"] > 2**40


@pytest.mark.parametrize("solver", ["cbc", "none"])
def test_a_named_solver_runs(tmp_path: Path, factory_file: Path, solver: str) -> None:
    result = plan_json(
        tmp_path, "--model", f"{factory_file}:mlp", "--batch-size", "8", "--solver", solver,
        "--optimizer", "sgd-momentum",
    )  # fmt: skip
    assert result["solver"] == solver
    assert result["provenance"]["order_solver"]["solver"] == solver
    assert result["is_optimal"]


def test_json_to_standard_output_stands_alone(factory_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", f"{factory_file}:mlp", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] > 0


def test_plot_writes_an_image(tmp_path: Path, factory_file: Path) -> None:
    image = tmp_path / "plan.png"
    assert cli.main(["plan", "--model", f"{factory_file}:mlp", "--plot", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def test_order_finds_the_smaller_peak(
    tmp_path: Path, graph_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order.json"
    assert cli.main(["order", str(graph_file), "--solver", "cbc", "--json", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["peak_bytes"] == result["lower_bound_bytes"] == 41
    assert result["order"] == ["start", "large", "shrink", "small", "join"]
    assert "lower bound" in capsys.readouterr().out


def test_order_and_addresses_are_planned_jointly(
    tmp_path: Path, graph_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert cli.main(["order", str(graph_file), "--joint", "--json", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["buffer_bytes"] == result["peak_bytes"] == 41
    assert "highs" in capsys.readouterr().out
    assert cli.main(["order", str(graph_file), "--joint", "--solver", "none"]) == 2


def test_a_graph_without_operators_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"format": 1, "operators": [], "arrays": []}', encoding="utf-8")
    assert cli.main(["order", str(path)]) == 2
    assert capsys.readouterr().err == f"olla-fx: {path}: the graph has no operators\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["plan"], "--model"),
        (["plan", "--model", "torchvision:resnet19"], "did you mean"),
        (["plan", "--model", "torchvision:resnet18", "--batch-size", "0"], "at least 1"),
        (["plan", "--model", "torchvision:resnet18", "--batch-size", "many"], "whole number"),
        (["plan", "--model", "torchvision:resnet18", "--image-size", "-3"], "at least 1"),
        (["plan", "--model", "torchvision:resnet18", "--time-limit", "soon"], "seconds"),
        (["plan", "--model", "torchvision:resnet18", "--solver", "oracle"], "oracle"),
        (["plan", "--model", "torchvision:resnet18", "--optimizer", "lbfgs"], "unknown optimizer"),
        (["plan", "--model", "torchvision:resnet18", "--device-profile", "v100"], "a100"),
        (["plan", "--model", "torchvision:resnet18", "--train", "--inference"], "not allowed"),
        (["plan", "--model", "torchvision:alexnet", "--image-size", "8"], "too small"),
        (["plan", "--model", "torchvision:resnet18", "--plot", "plan.bmp"], "--plot plan.bmp"),
        (["plan", "--model", "torchvision:resnet18", "--json", "nowhere/out.json"], "no folder"),
        (["plan", "--model", "nowhere.py:factory"], "no file"),
        (["order", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("olla-fx: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_model_that_branches_on_its_data_is_refused(
    factory_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--model", f"{factory_file}:branching"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_graph_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    path.write_text('{"format": 1, "operators": [{"name": "A"}], "arrays": [{}]}', encoding="utf-8")
    assert cli.main(["order", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_not_found_and_impossible_have_a_status_of_their_own(
    graph_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: Exception) -> Any:
        def order(*_: Any, **__: Any) -> None:
            raise error

        return order

    monkeypatch.setattr(cli_order, "order", failing(cli.NoSolutionError("nothing yet")))
    assert cli.main(["order", str(graph_file)]) == 1
    monkeypatch.setattr(cli_order, "order", failing(cli.InfeasibleError("no way")))
    assert cli.main(["order", str(graph_file)]) == 3
    assert capsys.readouterr().err == "olla-fx: nothing yet\nolla-fx: no way\n"


def run_command(*arguments: str, code: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, after some code."""
    start = f"{code}; import runpy; runpy.run_module('olla_fx', run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False,
        env={**os.environ, "PYTHONPATH": "solvers"},
    )  # fmt: skip


def test_the_package_is_the_command_and_says_one_line() -> None:
    done = run_command("plan", "--model", "torchvision:alexnet", "--image-size", "8")
    assert done.returncode == 2
    assert "too small" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_help_version_and_solvers_do_without_torch(tmp_path: Path, graph_file: Path) -> None:
    """Importing torch takes seconds."""
    spans = tmp_path / "spans.csv"
    spans.write_text("id,lower,upper,size\na,0,3,4\n", encoding="utf-8")
    without_torch = "import sys; sys.modules['torch'] = None"
    for arguments, said in (
        (["--help"], "plan a model's step"),
        (["--version"], f"olla-fx {olla_fx.__version__}\n"),
        (["order", "--help"], "--joint"),
        (["order", str(graph_file)], "lower bound"),
        (["place", str(spans)], "height"),
    ):
        done = run_command(*arguments, code=without_torch)
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout
    done = run_command("plan", "--help", code=without_torch)
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interrupt_ends_the_command_without_a_traceback(factory_file: Path) -> None:
    with factory_file.open("a", encoding="utf-8") as file:
        file.write("import signal, time\ndef interrupted():\n")
        # A process that was started in the background ignores interrupts.
        file.write("    signal.signal(signal.SIGINT, signal.default_int_handler)\n")
        file.write("    signal.raise_signal(signal.SIGINT)\n    time.sleep(60)\n")
    done = run_command("plan", "--model", f"{factory_file}:interrupted")
    assert (done.returncode, done.stderr, done.stdout) == (130, "olla-fx: interrupted\n", "")


def test_the_graph_of_a_plan_can_be_ordered(tmp_path: Path, factory_file: Path) -> None:
    plan = plan_json(tmp_path, "--model", f"{factory_file}:mlp")
    graph, path = tmp_path / "result.json", tmp_path / "order.json"
    assert cli.main(["order", str(graph), "--json", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["peak_bytes"] == plan["peak_bytes"] == result["lower_bound_bytes"]
    assert sorted(result["order"]) == sorted(plan["order"])
