"""The benchmark of placements speaks google/minimalloc's command line and believes no answer unseen."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STAND_IN = r'''#!{python}
"""Stacks spans; speaks the command line and tables of google/minimalloc (src/main.cc, src/converter.cc)."""
import os, re, sys

flags = {{}}
for argument in sys.argv[1:]:
    name, value = re.fullmatch(r"--?(\w+)=(.*)", argument).groups()
    if name not in ("capacity", "input", "output", "timeout"):
        sys.exit(f"ERROR: Unknown command line flag '{{name}}'")
    flags[name] = value
if not re.fullmatch(r"([0-9.]+(ns|us|ms|s|m|h))+", flags["timeout"]):
    sys.exit("ERROR: Illegal value specified for flag 'timeout'")
with open(flags["input"]) as table:
    header, *rows = [line.split(",") for line in table.read().split("\n") if line]
if [name for name in ("id", "lower", "upper", "size") if name not in header]:
    sys.exit(1)
if any(len(row) != len(header) for row in rows):
    sys.exit(1)
top, answer = 0, [[*header, "offset"]]
for row in rows:
    at = dict(zip(header, row))
    step = int(at.get("alignment", 1))
    offset = -(-top // step) * step if os.environ["STAND_IN"] != "collides" else 0
    answer.append([*row, str(offset)])
    top = offset + int(at["size"])
sys.stderr.write("0.001")
if top > int(flags["capacity"]):
    sys.exit(1)
if os.environ["STAND_IN"] == "forgets":
    answer.pop()
with open(flags["output"], "w") as output:
    output.write("".join(",".join(row) + "\n" for row in answer))
'''


def rows(folder: Path, table: str, capacity: int, manner: str = "") -> list[dict[str, Any]]:
    """Return the benchmark's rows of a table with the stand-in on the path."""
    program = folder / "bin" / "minimalloc"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "tables").mkdir()
    (folder / "tables" / "some.csv").write_text(table, encoding="utf-8")
    arguments = [
        *("placement.py", str(folder / "tables"), "--capacity", f"some={capacity}", "--time-limit", "5"),
        *("--methods", "minimalloc", "skyline", "--json", str(folder / "rows.json")),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        patch.setenv("STAND_IN", manner)
        patch.setattr(sys, "argv", arguments)
        benchmark().main()
    measured: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    assert {row["method"] for row in measured} == {"minimalloc", "skyline"}
    return [row for row in measured if row["method"] == "minimalloc"]


@cache
def benchmark() -> ModuleType:
    """The script, as a module."""
    path = Path(__file__).parents[1] / "examples" / "benchmarks" / "placement.py"
    spec = importlib.util.spec_from_file_location("placement_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HEADER = "id,lower,upper,size\n"
SMALL = HEADER + '"a, first",0,3,4\nb,2,5,4\nc,4,7,4\n'


def test_its_answer_is_measured(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, SMALL, 12)
    assert (row["height"], row["bound"], row["goal"]) == (12, 8, 12)
    assert not row["proven"]


def test_alignments_are_handed_on(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "id,lower,upper,size,alignment\na,0,3,4,\nb,2,5,4,16\n", 20)
    assert (row["height"], row["note"]) == (20, "")


def test_no_answer_is_no_height(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, SMALL, 9)
    assert row["height"] is None


def test_an_answer_that_collides_is_not_believed(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, SMALL, 12, "collides")
    assert row["height"] is None
    assert "overlap" in row["note"]


def test_an_answer_that_forgets_a_span_is_not_believed(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, SMALL, 12, "forgets")
    assert row["height"] is None
    assert "other spans" in row["note"]


def test_given_offsets_are_more_than_it_takes(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "id,lower,upper,size,offset\na,0,3,4,4\nb,2,5,4,\n", 12)
    assert row["height"] is None
    assert "given offsets" in row["note"]
