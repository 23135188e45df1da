"""What the commands of ``olla-fx`` share: options, checks of files, output. Imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olla_solvers.errors import OllaError
from olla_solvers.ilp import backends

SOLVERS = ("auto", *sorted(backends.SOLVERS), "none")


class UsageError(OllaError):
    """The command line cannot be read."""


def add_common(command: argparse.ArgumentParser) -> None:
    """Add the options that every command has."""
    command.add_argument(
        "--solver",
        choices=SOLVERS,
        default="auto",
        help="of the integer programs; auto: of placement alone, if it may help",
    )
    command.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="S",
        help="seconds for ordering and placing together (as long as it pays)",
    )
    command.add_argument("--json", metavar="FILE", help="write the result there; - for standard output alone")


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def check_folders(*paths: str | None) -> None:
    """Refuse a file that could not be written after minutes of planning."""
    for path in paths:
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"there is no folder {Path(path).parent} to write {Path(path).name} into")


def report(table: str, document: Mapping[str, Any], path: str | None) -> None:
    """Print a table, and write a document where the command line wants it.

    Args:
        table: for people.
        document: for programs.
        path: of the document; ``-`` for standard output, on which it then stands alone.
    """
    text = json.dumps(document, indent=1)
    if path == "-":
        print_line(text)
        return
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")
    print_line(table)


def print_line(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{text}\n")
