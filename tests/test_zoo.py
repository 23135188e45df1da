from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def zoo(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "solvers"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "examples/benchmarks/zoo.py", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )


def rows_in(path: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))}


def test_the_zoo_says_what_passes_and_why_others_do_not(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    run = ["--families", "transformers", "--json", str(path), "--resume"]
    done = zoo(*run, "--names", "vit", "ibert")
    rows = rows_in(path)
    assert {name: row["status"] for name, row in rows.items()} == {"vit": "pass", "ibert": "eager"}
    assert "quant_modules.py, line" in rows["ibert"]["reason"]
    assert "mask" not in rows["ibert"]["reason"], "advice for another case"
    assert len(rows["vit"]["losses"]) == 2
    assert rows["vit"]["served"] > 0
    assert rows["vit"]["outside"] == 0
    assert "| transformers | 2 | 1 | 50.0 |  |  |  | 1 eager: ibert |" in done.stdout

    again = zoo(*run, "--names", "vit", "swin*", "--time-limit", "0.2")
    assert "vit" not in again.stderr
    assert "not done after 0.2 s, at last in " in rows_in(path)["swin"]["reason"]
    assert {name: row["status"] for name, row in rows_in(path).items()} == {
        "vit": "pass", "ibert": "eager", "swin": "timeout", "swinv2": "timeout",
    }  # fmt: skip


@pytest.mark.slow
def test_the_zoo_counts_models_with_masks_in_columns(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    families = ["transformers", "transformers, mask right"]
    done = zoo("--families", *families, "--names", "bert", "ibert", "reformer", "vit", "--json", str(path))
    rows = {(row["family"], row["name"]): row for row in json.loads(path.read_text(encoding="utf-8"))}
    status = {"bert": "pass", "ibert": "eager", "reformer": "refused", "vit": "pass"}
    assert {name: row["status"] for (family, name), row in rows.items() if family == families[0]} == status
    del status["vit"]  # takes no mask
    assert {name: row["status"] for (family, name), row in rows.items() if family == families[1]} == status
    assert rows[families[1], "bert"]["losses"] != rows[families[0], "bert"]["losses"]
    assert rows[families[1], "bert"]["served"] > 0
    assert all("eager not deterministic" in rows[family, "reformer"]["reason"] for family in families)
    others = "1 eager: ibert; 1 refused: reformer"
    assert f"| transformers | 4 | 2 | 50.0 |  | 1 of 3 |  | {others} |" in done.stdout


@pytest.mark.slow
def test_the_zoo_tells_models_that_keep_a_memory_budget(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    run = ["--families", "transformers", "--names", "vit", "--json", str(path), "--batch", "12"]
    zoo(*run, "--memory-budget", "0.7")
    row = rows_in(path)["vit"]
    assert row["status"] == "pass"
    assert row["recomputed"] > 0
    assert len(row["losses"]) == 5
    assert row["peak_bytes"] <= row["needed_bytes"] <= row["budget_bytes"] < row["plain_bytes"]
    done = zoo(*run, "--memory-budget", "0.01")
    row = rows_in(path)["vit"]
    assert row["status"] == "no plan"
    assert "no plan within the memory budget" in row["reason"]
    assert "| transformers | 1 | 0 | 0.0 |  |  |  | 1 no plan: vit |" in done.stdout


def test_the_zoo_is_large() -> None:
    names = [line.split("\t") for line in zoo("--list").stdout.splitlines()]
    families = [family for family, _ in names]
    assert families.count("classification") >= 80
    assert families.count("segmentation") >= 6
    assert families.count("video") >= 9
    assert families.count("transformers") >= 100
