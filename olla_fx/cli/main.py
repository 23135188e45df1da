"""Runs the command ``olla-fx``: plans a model's step, orders a graph or places spans from a file.

Each command is a module of this package with ``add_options`` and ``run``, imported if it is the one that was
called: only ``plan`` needs torch, which takes seconds to import.

Exit status: 0 done, 1 not found within the time, 2 bad input, 3 proven impossible, 130 interrupted; each but
the first with one line on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import olla_fx
from olla_fx.cli.common import UsageError, add_common
from olla_fx.errors import BudgetError
from olla_solvers.errors import InfeasibleError, NoSolutionError, OllaError

DONE, NOT_FOUND, BAD_INPUT, IMPOSSIBLE = range(4)
INTERRUPTED = 130
"""What shells report of a process that SIGINT (2) has ended: 128 + 2."""

COMMANDS = {
    "plan": "plan a model's step under fake tensors; runs nothing",
    "order": "order the operators of a graph file",
    "place": "give the spans of a table their offsets in one buffer",
}


class _Parser(argparse.ArgumentParser):
    """Raises an error instead of printing its usage over several lines."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the words after the command's name; None for the process's own.

    Returns:
        The exit status.
    """
    try:
        with _quiet_logging():
            parsed = _parse(sys.argv[1:] if arguments is None else arguments)
            parsed.run(parsed)
    except NoSolutionError as error:
        return _fail(NOT_FOUND, str(error))
    except InfeasibleError as error:
        return _fail(IMPOSSIBLE, str(error))
    except BudgetError as error:
        return _fail(IMPOSSIBLE if error.is_proven else NOT_FOUND, str(error))
    except (OllaError, OSError, ImportError) as error:
        return _fail(BAD_INPUT, str(error))
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted")
    return DONE


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Keep torch from logging, in many lines, an error that the command reports in one."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _fail(status: int, reason: str) -> int:
    sys.stderr.write(f"olla-fx: {' '.join(reason.split())}\n")
    return status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, knowing the options of the command that it calls."""
    parser = _Parser(prog="olla-fx", description="Plans the memory of a PyTorch model's step.")
    parser.add_argument("--version", action="version", version=f"olla-fx {olla_fx.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        if name in arguments[:1]:
            module = importlib.import_module(f"olla_fx.cli.{name}")
            command.set_defaults(run=module.run)
            module.add_options(command)
            add_common(command)
    return parser.parse_args(arguments)
