"""Spans as comma-separated values, the format of google/minimalloc.

A header, then one line for each span: ``id,lower,upper,size``, ``upper`` exclusive, sizes in bytes; and
optionally ``offset`` (given beforehand, may be empty) and ``alignment`` (may be empty, for 1). A placement
is written as ``id,lower,upper,size,offset``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from olla_solvers.errors import ProblemError
from olla_solvers.plan import Span
from olla_solvers.problem import MOST_BYTES, Bytes, Offset
from olla_solvers.spans.checks import fault_of, given_collision

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("offset", "alignment")


def read_spans(path: str | Path, *, capacity_bytes: Bytes | None = None) -> tuple[Span, ...]:
    """Read spans from a file.

    Args:
        path: the file.
        capacity_bytes: room for all spans, which none may exceed; None for no limit.

    Returns:
        One span for each line.

    Raises:
        ProblemError: naming file and line, if the file is not such a table, a value is not a whole number, an
            id occurs twice, ``upper`` is not above ``lower``, a size is not positive or above the capacity,
            or two given offsets collide (naming both lines).
        OSError: if the file cannot be read.
    """
    rows = _rows(path)
    if not rows:
        raise ProblemError(f"{path}, line 1: the file is empty; its header must be {','.join(REQUIRED)}")
    columns = _columns(path, rows[0][1])
    spans: list[Span] = []
    seen: dict[str, int] = {}
    for line, row in rows[1:]:
        if not row:
            continue
        where = f"{path}, line {line}"
        if len(row) != len(columns):
            raise ProblemError(f"{where}: {len(row)} values for {len(columns)} columns")
        span = _span(where, dict(zip(columns, (value.strip() for value in row), strict=True)))
        if span.name in seen:
            raise ProblemError(f"{where}: id {span.name!r} occurs before, in line {seen[span.name]}")
        if capacity_bytes is not None and span.size_bytes > capacity_bytes:
            raise ProblemError(
                f"{where}: span {span.name!r} has {span.size_bytes} B, more than the capacity of "
                f"{capacity_bytes} B"
            )
        seen[span.name] = line
        spans.append(span)
    _refuse_collision(path, spans, seen)
    return tuple(spans)


def write_placement(path: str | Path, spans: Sequence[Span], offsets: Sequence[Offset]) -> None:
    """Write spans with their offsets to a file.

    Args:
        path: the file.
        spans: as read.
        offsets: one for each span.
    """
    Path(path).write_text(placement_text(spans, offsets), encoding="utf-8", newline="")


def placement_text(spans: Sequence[Span], offsets: Sequence[Offset]) -> str:
    """Return the text that :func:`write_placement` writes."""
    lines = [",".join((*REQUIRED, "offset"))]
    for span, offset in zip(spans, offsets, strict=True):
        lines.append(f"{_quoted(span.name)},{span.lower},{span.upper},{span.size_bytes},{offset}")
    return "\n".join(lines) + "\n"


def _rows(path: str | Path) -> list[tuple[int, list[str]]]:
    """Return each row with the line on which it ends."""
    line = 1
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows = []
        for row in reader:
            rows.append((reader.line_num, row))
            line = reader.line_num + 1
        return rows
    except (UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, UnicodeDecodeError):
            line = error.object.count(b"\n", 0, error.start) + 1
        raise ProblemError(f"{path}, line {line}: no comma-separated values ({error})") from error


def _columns(path: str | Path, header: Sequence[str]) -> tuple[str, ...]:
    columns = tuple(name.strip() for name in header)
    for name in REQUIRED:
        if name not in columns:
            raise ProblemError(f"{path}, line 1: column {name!r} is missing; found {','.join(columns)!r}")
    for position, name in enumerate(columns):
        if name not in REQUIRED + OPTIONAL:
            known = ", ".join(REQUIRED + OPTIONAL)
            raise ProblemError(f"{path}, line 1: unknown column {name!r}; the columns are {known}")
        if name in columns[:position]:
            raise ProblemError(f"{path}, line 1: column {name!r} occurs twice")
    return columns


def _span(where: str, row: dict[str, str]) -> Span:
    if not row["id"]:
        raise ProblemError(f"{where}: the id is empty")
    offset, alignment = row.get("offset", ""), row.get("alignment", "")
    span = Span(
        row["id"],
        _number(where, "lower", row["lower"]),
        _number(where, "upper", row["upper"]),
        _number(where, "size", row["size"]),
        _number(where, "alignment", alignment) if alignment else 1,
        _number(where, "offset", offset) if offset else None,
    )
    fault = "has no bytes" if span.size_bytes == 0 else fault_of(span)
    if fault is not None:
        raise ProblemError(f"{where}: span {span.name!r} {fault}")
    return span


def _refuse_collision(path: str | Path, spans: Sequence[Span], lines: Mapping[str, int]) -> None:
    clash = given_collision(spans)
    if clash is None:
        return
    first, second = sorted((spans[index] for index in clash), key=lambda span: lines[span.name])
    raise ProblemError(
        f"{path}, line {lines[second.name]}: the given offsets of {second.name!r} {_extent(second)} and "
        f"{first.name!r} {_extent(first)}, in line {lines[first.name]}, overlap while both are alive"
    )


def _extent(span: Span) -> str:
    low = span.offset or 0
    return f"[{low}, {low + span.size_bytes})"


def _number(where: str, column: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ProblemError(f"{where}: {column} is {text!r}, which is not a whole number")
    number = int(text) if len(text) < 20 else MOST_BYTES
    if abs(number) >= MOST_BYTES:
        raise ProblemError(f"{where}: {column} is {text}, which is beyond 2**62")
    return number


def _quoted(name: str) -> str:
    """Return a name as one value of the table."""
    if any(character in name for character in ',"\r\n'):
        return '"' + name.replace('"', '""') + '"'
    return name
