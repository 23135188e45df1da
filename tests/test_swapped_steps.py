"""The benchmark of steps that swap runs; what it shows is no test, since the machine may be busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_steps_are_simulated_and_executed() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "examples/benchmarks/swapped_steps.py"),
            *("--models", "mlp", "--shares", "1", "--rounds", "1"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "solvers")])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, head, row = done.stdout.strip().splitlines()
    assert name == "mlp"
    assert "simulated" in head
    assert row.count(" ms") == 4
