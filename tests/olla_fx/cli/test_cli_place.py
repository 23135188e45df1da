"""``olla-fx place``: three outcomes and bad input, each with its exit status and one line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from olla_fx.cli.main import main
from olla_solvers.spans.table import read_spans

HEADER = "id,lower,upper,size\n"
SMALL = HEADER + "a,0,3,4\nb,2,5,4\nc,4,7,4\n"


def write(folder: Path, text: str) -> str:
    path = folder / "spans.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_placement_is_written_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "offsets.csv")
    assert main(["place", write(tmp_path, SMALL), "--capacity", "8", "--output", out]) == 0
    assert "live bytes" in capsys.readouterr().out
    assert [span.offset for span in read_spans(out)] in ([0, 4, 0], [4, 0, 4])


def test_the_table_and_the_document_go_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, SMALL)
    assert main(["place", path, "--output", "-"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "id,lower,upper,size,offset"
    assert main(["place", path, "--json", "-", "--method", "skyline"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["buffer_bytes"] == document["peak_bytes"] == document["lower_bound_bytes"] == 8
    assert document["is_optimal"] is True
    assert sorted(document["offsets"]) == ["a", "b", "c"]
    assert document["seconds"]["place"] >= 0


@pytest.mark.parametrize("capacity", ["7", "5"])
def test_the_impossible_is_proven_with_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], capacity: str
) -> None:
    assert main(["place", write(tmp_path, SMALL), "--capacity", capacity]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'a', 'b'" in error


def test_running_out_of_time_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(4)
    lines = [
        f"s{i},{lower},{lower + draw.randint(20, 90)},{draw.randint(50, 999)}"
        for i, lower in enumerate(draw.randrange(150) for _ in range(150))
    ]
    path = write(tmp_path, HEADER + "\n".join(lines) + "\n")
    lowest = max(
        sum(span.size_bytes for span in read_spans(path) if span.lower <= t < span.upper) for t in range(250)
    )
    assert main(["place", path, "--capacity", str(lowest), "--method", "size-best-fit"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (HEADER + "a,2,2,4\n", [], "line 2"),
        (SMALL, ["--capacity", "3"], "line 2: span 'a' has 4 B, more than the capacity of 3 B"),
        ("id,lower,upper,size,offset\na,0,2,8,0\nb,1,3,8,4\n", [], "line 3: the given offsets of 'b'"),
        (SMALL, ["--capacity", "-3"], "whole number of bytes"),
        (SMALL, ["--method", "luck"], "luck"),
        (SMALL, ["--output", "nowhere/at/all.csv"], "no folder"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, more: list[str], words: str
) -> None:
    assert main(["place", write(tmp_path, text), *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_a_missing_file_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "no/such/spans.csv"]) == 2
    assert "spans.csv" in capsys.readouterr().err
