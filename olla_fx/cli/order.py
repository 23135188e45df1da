"""``olla-fx order``: orders the operators of a graph from a file. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import Any

from olla_fx.cli.common import UsageError, check_folders, report
from olla_fx.progress import Progress
from olla_fx.report import format_bytes, format_table
from olla_solvers.errors import ProblemError
from olla_solvers.order import order
from olla_solvers.paper.joint import joint_plan
from olla_solvers.plan import Schedule
from olla_solvers.plan_json import plan_to_json
from olla_solvers.problem import Problem


def add_options(command: argparse.ArgumentParser) -> None:
    """Add what ``order`` takes besides solver, time limit and ``--json``."""
    command.add_argument(
        "graph", metavar="GRAPH.json", help="a dataflow graph; docs/solvers.md has the format"
    )
    command.add_argument(
        "--joint", action="store_true", help="order and addresses in one integer program; for small graphs"
    )


def run(parsed: argparse.Namespace) -> None:
    """Order the operators of a graph file.

    Args:
        parsed: the command line.
    """
    check_folders(parsed.json)
    problem = Problem.load(parsed.graph)
    if not problem.operators:
        raise ProblemError(f"{parsed.graph}: the graph has no operators")
    if parsed.joint:
        _run_joint(parsed, problem)
        return
    with Progress() as progress:
        progress.begin("order", f"{len(problem.operators):,} operators")
        observer = partial(progress.note, "order")
        schedule = order(problem, solver=parsed.solver, time_limit=parsed.time_limit, observer=observer)
    rows = [
        ("operators", f"{len(schedule.order):,}"),
        ("peak", format_bytes(schedule.peak_bytes)),
        ("lower bound", format_bytes(schedule.lower_bound_bytes)),
        ("order found by / proved by", f"{schedule.found_by} / {schedule.proved_by or 'open'}"),
        ("seconds", f"{schedule.seconds:.2f}"),
    ]
    report(format_table(rows), _document(problem, schedule, parsed.solver), parsed.json)


def _run_joint(parsed: argparse.Namespace, problem: Problem) -> None:
    """Order and place by one integer program; ``auto`` is HiGHS, which has no size limit."""
    if parsed.solver == "none":
        raise UsageError("--joint is an integer program: name its --solver, or leave it out")
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
    report(format_table(rows), plan_to_json(plan), parsed.json)


def _document(problem: Problem, schedule: Schedule, solver: str) -> dict[str, Any]:
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
