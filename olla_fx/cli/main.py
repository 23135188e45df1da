"""Runs the command ``olla-fx``: plans a model's step, orders a graph or places spans from a file.

Nothing is run and no weights are loaded: ``plan`` builds its model on the meta device.

Exit status: 0 done, 1 not found within the time, 2 bad input, 3 proven impossible; each but the first with
one line on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from olla_fx import models
from olla_fx.api import plan as plan_step
from olla_fx.cli import place as cli_place
from olla_fx.errors import OllaError
from olla_fx.plan import Plan
from olla_fx.report import format_bytes, format_table
from olla_solvers.errors import InfeasibleError, NoSolutionError, ProblemError
from olla_solvers.ilp import backends
from olla_solvers.order import order
from olla_solvers.paper.joint import joint_plan
from olla_solvers.plan import Schedule
from olla_solvers.plan_json import plan_to_json
from olla_solvers.problem import Problem

DONE, NOT_FOUND, BAD_INPUT, IMPOSSIBLE = range(4)
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
SOLVERS = ("auto", *sorted(backends.SOLVERS), "none")


class _UsageError(OllaError):
    """The command line cannot be read."""


class _Parser(argparse.ArgumentParser):
    """Raises an error instead of printing its usage over several lines."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: the words after the command's name; None for the process's own.

    Returns:
        The exit status.
    """
    try:
        with _quiet_logging():
            parsed = _parser().parse_args(arguments)
            parsed.run(parsed)
    except NoSolutionError as error:
        return _fail(NOT_FOUND, error)
    except InfeasibleError as error:
        return _fail(IMPOSSIBLE, error)
    except (OllaError, OSError, ImportError) as error:
        return _fail(BAD_INPUT, error)
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


def _fail(status: int, error: Exception) -> int:
    sys.stderr.write(f"olla-fx: {' '.join(str(error).split())}\n")
    return status


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _parser() -> _Parser:
    parser = _Parser(prog="olla-fx", description="Plans the memory of a PyTorch model's step.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_order(commands)
    _add_place(commands)
    return parser


def _add_plan(commands: Any) -> None:
    command = commands.add_parser("plan", help="plan a model's step under fake tensors; runs nothing")
    command.set_defaults(run=_run_plan)
    command.add_argument("--model", required=True, metavar="NAME", help=" | ".join(models.FAMILIES))
    command.add_argument("--batch-size", type=_count, default=1, metavar="N")
    command.add_argument("--image-size", type=_count, metavar="N", help="height and width of images")
    command.add_argument("--tokens", type=_count, default=models.TOKENS, metavar="N", help="length of text")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument(
        "--train",
        dest="kind",
        action="store_const",
        const="train",
        default="train",
        help="a whole training step (default)",
    )
    kind.add_argument(
        "--own-loop",
        dest="kind",
        action="store_const",
        const="own-loop",
        help="forward and backward, in a training loop of one's own",
    )
    kind.add_argument(
        "--inference", dest="kind", action="store_const", const="inference", help="the forward pass alone"
    )
    command.add_argument("--optimizer", default="sgd", metavar="NAME", help=" | ".join(models.OPTIMIZERS))
    command.add_argument("--no-baseline", action="store_true", help="do not ask what eager would need")
    command.add_argument("--plot", metavar="FILE", help="draw the plan into a .png, .svg or .pdf file")
    _add_common(command)


def _add_order(commands: Any) -> None:
    command = commands.add_parser("order", help="order the operators of a graph file")
    command.set_defaults(run=_run_order)
    command.add_argument(
        "graph", metavar="GRAPH.json", help="a dataflow graph; docs/solvers.md has the format"
    )
    command.add_argument(
        "--joint", action="store_true", help="order and addresses in one integer program; for small graphs"
    )
    _add_common(command)


def _add_place(commands: Any) -> None:
    command = commands.add_parser("place", help="give the spans of a table their offsets in one buffer")
    command.set_defaults(run=_run_place)
    cli_place.add_options(command)
    _add_common(command)


def _add_common(command: argparse.ArgumentParser) -> None:
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


def _count(text: str) -> int:
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


def _run_plan(parsed: argparse.Namespace) -> None:
    _check_folders(parsed.json, parsed.plot)
    if parsed.plot and Path(parsed.plot).suffix not in PLOT_SUFFIXES:
        raise _UsageError(f"--plot {parsed.plot}: the name must end in one of {', '.join(PLOT_SUFFIXES)}")
    case = models.build_model(
        parsed.model,
        batch_size=parsed.batch_size,
        image_size=parsed.image_size,
        tokens=parsed.tokens,
        train=parsed.kind != "inference",
        device="meta",
    )
    optimizer = models.optimizer_by_name(parsed.optimizer, case.model.parameters())
    in_own_loop, whole_step = parsed.kind == "own-loop", parsed.kind == "train"
    plan = plan_step(
        case.model,
        case.inputs[:-1] if in_own_loop else case.inputs,
        loss_fn=case.loss_fn if whole_step else None,
        optimizer=optimizer if whole_step else None,
        solver=parsed.solver,
        time_limit=parsed.time_limit,
        baseline=not parsed.no_baseline,
    )
    _report(plan.report(), _plan_document(plan, parsed.solver), parsed.json)
    if parsed.plot:
        plan.plot(parsed.plot)


def _run_order(parsed: argparse.Namespace) -> None:
    _check_folders(parsed.json)
    problem = Problem.load(parsed.graph)
    if not problem.operators:
        raise ProblemError(f"{parsed.graph}: the graph has no operators")
    if parsed.joint:
        _run_joint(parsed, problem)
        return
    schedule = order(problem, solver=parsed.solver, time_limit=parsed.time_limit)
    rows = [
        ("operators", f"{len(schedule.order):,}"),
        ("peak", format_bytes(schedule.peak_bytes)),
        ("lower bound", format_bytes(schedule.lower_bound_bytes)),
        ("order found by / proved by", f"{schedule.found_by} / {schedule.proved_by or 'open'}"),
        ("seconds", f"{schedule.seconds:.2f}"),
    ]
    _report(format_table(rows), _order_document(problem, schedule, parsed.solver), parsed.json)


def _run_joint(parsed: argparse.Namespace, problem: Problem) -> None:
    """Order and place by one integer program; ``auto`` is HiGHS, which has no size limit."""
    if parsed.solver == "none":
        raise _UsageError("--joint is an integer program: name its --solver, or leave it out")
    solver = "highs" if parsed.solver == "auto" else parsed.solver
    plan = joint_plan(problem, solver=solver, time_limit=parsed.time_limit)
    provenance = plan.provenance
    rows = [
        ("operators", f"{len(plan.order):,}"),
        ("peak", format_bytes(plan.peak_bytes)),
        ("buffer", format_bytes(plan.buffer_bytes)),
        (
            "buffer found by / proved by",
            f"{provenance.place_found_by} / {provenance.place_proved_by or 'open'}",
        ),
        ("integer program", f"{provenance.place_solver.status} {provenance.place_solver.detail}".strip()),
        ("seconds", f"{plan.timings['joint']:.2f}"),
    ]
    _report(format_table(rows), plan_to_json(plan), parsed.json)


def _run_place(parsed: argparse.Namespace) -> None:
    _check_folders(parsed.json, parsed.output)
    rows, document, table = cli_place.run(parsed)
    if table is not None:
        sys.stdout.write(table)
    else:
        _report(format_table(rows), document, parsed.json)


def _check_folders(*paths: str | None) -> None:
    """Refuse a file that could not be written after minutes of planning."""
    for path in paths:
        if path and path != "-" and not Path(path).absolute().parent.is_dir():
            raise _UsageError(f"there is no folder {Path(path).parent} to write {Path(path).name} into")


def _report(table: str, document: Mapping[str, Any], path: str | None) -> None:
    text = json.dumps(document, indent=1)
    if path == "-":
        _print_line(text)
        return
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")
    _print_line(table)


def _plan_document(plan: Plan, solver: str) -> dict[str, Any]:
    return {
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "is_optimal": plan.is_optimal,
        "buffer_bytes": plan.buffer_bytes,
        "fragmentation": plan.fragmentation,
        "static_bytes": plan.static_bytes,
        "gradient_bytes": plan.gradient_bytes,
        "output_bytes": plan.output_bytes,
        "total_bytes": plan.total_bytes,
        "seconds": dict(plan.timings),
        "solver": solver,
        "provenance": dataclasses.asdict(plan.provenance),
        "baseline": None if plan.baseline is None else plan.baseline.to_json(),
        "order": list(plan.order),
        "offsets": dict(plan.offsets),
    }


def _order_document(problem: Problem, schedule: Schedule, solver: str) -> dict[str, Any]:
    return {
        "peak_bytes": schedule.peak_bytes,
        "lower_bound_bytes": schedule.lower_bound_bytes,
        "is_optimal": schedule.is_optimal,
        "seconds": {"order": schedule.seconds},
        "solver": solver,
        "provenance": {
            "order_found_by": schedule.found_by,
            "order_proved_by": schedule.proved_by,
            "order_solver": dataclasses.asdict(schedule.solver),
        },
        "order": [problem.operators[operator].name for operator in schedule.order],
    }
