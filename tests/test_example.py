from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_resnet18_trains_to_the_same_weights_in_one_buffer() -> None:
    paths = [str(ROOT), str(ROOT / "solvers"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "examples/train_resnet18.py", "--steps", "2", "--batch-size", "8", "--threads", "1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = dict(line.rsplit("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    rows = {name.strip(): value.strip() for name, value in table.items()}
    assert rows["losses and weights identical"] == "yes"
    assert rows["arrays live in"] == "buffer"
    assert int(rows["requests served in the buffer"].replace(",", "")) > 100
    assert rows["requests served outside: others"] == "0"
    assert mebibytes(rows["planned peak"]) < mebibytes(rows["eager peak, recorded"])
    assert mebibytes(rows["eager peak, recorded"]) <= mebibytes(rows["caching allocator, reserved (model)"])
    stages = ("capture", "order", "place", "build")
    assert all(float(rows[f"seconds, {stage}"]) >= 0 for stage in stages)


def mebibytes(text: str) -> float:
    number, unit = text.split()
    assert unit == "MiB"
    return float(number.replace(",", ""))
