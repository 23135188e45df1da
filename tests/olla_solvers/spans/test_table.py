"""Tables of spans: read, written, and refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from olla_solvers.errors import ProblemError
from olla_solvers.plan import Span
from olla_solvers.spans.table import read_spans, write_placement

HEADER = "id,lower,upper,size\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "spans.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_required_and_optional_columns_in_any_sequence(tmp_path: Path) -> None:
    path = write(tmp_path, "size, id,upper,lower,alignment,offset\n8,a,4,0,,16\n4,b,3,1,64,\n\n")
    assert read_spans(path) == (Span("a", 0, 4, 8, 1, 16), Span("b", 1, 3, 4, 64))


def test_what_is_written_reads_as_given_offsets(tmp_path: Path) -> None:
    names = ('odd "name", with comma', '"quoted"', "two\nlines", "twolines", "far\u2028off", "b")
    items = tuple(Span(name, 0, 4, 8) for name in names)
    write_placement(tmp_path / "out.csv", items, range(0, 48, 8))
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "id,lower,upper,size,offset"
    assert [span.offset for span in read_spans(tmp_path / "out.csv")] == [*range(0, 48, 8)]
    assert [span.name for span in read_spans(tmp_path / "out.csv")] == [span.name for span in items]


def test_a_table_without_lines_holds_no_spans(tmp_path: Path) -> None:
    assert read_spans(write(tmp_path, HEADER)) == ()


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "empty"),
        ("id,lower,upper\na,0,1\n", 1, "'size' is missing"),
        ("id,lower,upper,size,colour\na,0,1,4,red\n", 1, "unknown column 'colour'"),
        ("id,lower,upper,size,size\na,0,1,4,4\n", 1, "'size' occurs twice"),
        (HEADER + "a,0,1,4\nb,0,1\n", 3, "3 values for 4 columns"),
        (HEADER + "a,0,one,4\n", 2, "upper is 'one'"),
        (HEADER + "a,0,1,4.5\n", 2, "size is '4.5'"),
        (HEADER + "a,0,1,4\na,1,2,4\n", 3, "'a' occurs before, in line 2"),
        (HEADER + "a,2,2,4\n", 2, "empty lifetime"),
        (HEADER + "a,3,2,4\n", 2, "empty lifetime"),
        (HEADER + "a,0,1,0\n", 2, "no bytes"),
        (HEADER + "a,0,1,-4\n", 2, "negative size"),
        (HEADER + ",0,1,4\n", 2, "id is empty"),
        (HEADER + f"a,0,1,{2**70}\n", 2, "beyond"),
        (HEADER + "a,0,1," + "9" * 5000 + "\n", 2, "beyond"),
        (HEADER + "a,0,1,1_000\n", 2, "not a whole number"),
        (HEADER + 'b,0,1,4\n"a,0,1,4\n', 3, "no comma-separated values"),
        (HEADER + '"a\nb",0,1,4\nc,1,1,4\n', 4, "empty lifetime"),
        (HEADER + "a\u2028b,0,1,4\nc,1,1,4\n", 3, "empty lifetime"),
        (HEADER.replace("\n", "\r\n") + "a,0,1,4\r\nc,1,1,4\r\n", 3, "empty lifetime"),
        (HEADER + "a,0,1,4\n\nb,0,1,99\n", 4, "more than the capacity of 50 B"),
        ("id,lower,upper,size,alignment\na,0,1,4,0\n", 2, "alignment 0"),
        ("id,lower,upper,size,offset,alignment\na,0,1,4,6,4\n", 2, "multiple of its alignment"),
    ],
)
def test_bad_tables_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ProblemError) as caught:
        read_spans(path, capacity_bytes=50)
    assert f"{path}, line {line}: " in str(caught.value)
    assert words in str(caught.value)


def test_given_offsets_that_collide_are_refused_with_both_lines(tmp_path: Path) -> None:
    table = "id,lower,upper,size,offset\na,0,2,8,0\n\nfree,0,3,8,\nb,1,3,8,4\nlate,2,3,4,0\n"
    path = write(tmp_path, table)
    with pytest.raises(ProblemError) as caught:
        read_spans(path)
    assert f"{path}, line 5: " in str(caught.value)
    assert "'b' [4, 12) and 'a' [0, 8), in line 2, overlap" in str(caught.value)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spans.csv"
    path.write_bytes(HEADER.encode() + b"\xff\xfe\x00\x01")
    with pytest.raises(ProblemError, match=r"spans\.csv, line 2"):
        read_spans(path)
