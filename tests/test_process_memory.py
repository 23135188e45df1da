"""The benchmark of a process's memory runs its ways apart and says what each of them needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WAYS = ("eager", "whole step")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_growth_is_measured_beside_what_the_allocator_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    paths = [str(ROOT), str(ROOT / "solvers"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "examples/benchmarks/process_memory.py", "--quick", "--ways", *WAYS, "--json", path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["way"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    assert tuple(rows) == WAYS
    for row in rows.values():
        assert row["later_peak"] >= row["later_steady"] > 0
        # Resident memory holds the blocks that are alive and what is no tensor, but it grows by less: a step
        # is given again what was freed while the process loaded, and need not touch all of a block.
        assert 0.8 * row["live"] < max(row["first_peak"], row["later_peak"])
    assert "reported" not in rows["eager"]
    assert rows["whole step"]["bindings"] == ["buffer"]
    # What is planned is rounded up to the alignment.
    assert rows["whole step"]["live"] == pytest.approx(rows["whole step"]["reported"], abs=1024)
    assert "| LSTM | whole step |" in done.stdout
    assert "| live | " in done.stdout
