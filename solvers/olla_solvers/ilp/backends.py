"""Runs CBC, Gurobi and HiGHS against a deadline, and tells which of them can be used.

A solver may be installed and its licence not take a model: the first is looked up, the second only the
solver can tell. Every run happens in a process of its own
(:mod:`olla_solvers.ilp.solver_process`) that is ended, with all it started, when its time is over.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from olla_solvers.effort.apart import run_module
from olla_solvers.errors import OptionError, SolverUnavailableError
from olla_solvers.ilp import solver_process
from olla_solvers.ilp.model import Expression, LinearModel
from olla_solvers.plan import SolverStatus

SOLVERS = ("gurobi", "highs", "cbc")
"""Integer program solvers, the fastest first."""

FREE_GUROBI_SIZE = 2000
"""Variables and constraints that the licence inside the gurobipy wheel takes."""

_MODULES = {"gurobi": "gurobipy", "highs": "highspy", "cbc": "pulp"}
_RELATIVE_TOLERANCE = 1e-6


class Outcome(enum.StrEnum):
    """The end of a solver's run, with or without a solution."""

    OPTIMAL = "optimal"
    STOPPED = "stopped"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a solver's run.

    Attributes:
        outcome: how it ended.
        values: for each column its value, if a solution was found.
        objective: the solution's, as the solver computed it.
        bound: no solution is below it, within the solver's tolerance; None if nothing is proven.
        seconds: wall-clock time, starting the process included.
        detail: the solver's own words.
        work: that it took, in the solver's own measure, about seconds of an idle machine; CBC has none, and
            goes by the clock.
    """

    outcome: Outcome
    values: tuple[float, ...] | None
    objective: float | None
    bound: float | None
    seconds: float
    detail: str
    work: float = 0.0


def is_installed(solver: str) -> bool:
    """Return True if a solver's Python module is installed; this says nothing about its licence."""
    if importlib.util.find_spec("pulp") is None:
        return False
    if solver == "cbc":
        return _has_cbc()
    return importlib.util.find_spec(_MODULES[solver]) is not None


def available_solvers() -> tuple[str, ...]:
    """Return the solvers that are installed, the fastest first."""
    return tuple(solver for solver in SOLVERS if is_installed(solver))


def may_take(solver: str, columns: int, rows: int) -> bool:
    """Return False if a solver's licence is known not to take a model of this size.

    Args:
        solver: one of :data:`SOLVERS`.
        columns: the model's variables.
        rows: the model's constraints.

    Returns:
        False only for Gurobi beyond its wheel's licence, if no other licence is in sight.
    """
    if solver != "gurobi" or max(columns, rows) <= FREE_GUROBI_SIZE:
        return True
    licence = os.environ.get("GRB_LICENSE_FILE")
    places = [Path(licence)] if licence else [Path.home() / "gurobi.lic", Path("/opt/gurobi/gurobi.lic")]
    return any(place.is_file() for place in places)


@cache
def takes_any_size(solver: str) -> bool:
    """Return True if a solver takes a model that is larger than what a licence without cost allows.

    Where licences may lie only the solver knows, so it is asked once, with such a model.

    Args:
        solver: one of :data:`SOLVERS`, installed.
    """
    if solver != "gurobi":
        return True
    model = LinearModel()
    columns = [model.binary() for _ in range(FREE_GUROBI_SIZE + 1)]
    model.require(Expression((column, 1) for column in columns), ">=", 1)
    try:
        return solve(model, solver).outcome is Outcome.OPTIMAL
    except SolverUnavailableError:
        return False


def require(solver: str) -> None:
    """Refuse a solver that cannot be used here.

    Args:
        solver: a name as the user gave it.

    Raises:
        SolverUnavailableError: saying what to install.
    """
    if solver not in SOLVERS:
        raise SolverUnavailableError(f"unknown solver {solver!r}; one of auto, cbc, gurobi, highs, none")
    if not is_installed(solver):
        raise SolverUnavailableError(_not_installed(solver))


def check_options(solver: str, time_limit: float | None) -> None:
    """Refuse a solver or a time limit before any work is done.

    Args:
        solver: ``auto``, ``none`` or one of :data:`SOLVERS`.
        time_limit: seconds, or None.

    Raises:
        SolverUnavailableError: if the solver is unknown or not installed.
        OptionError: if the limit is not a number of seconds.
    """
    if solver not in ("auto", "none"):
        require(solver)
    if time_limit is not None:
        number = isinstance(time_limit, int | float) and not isinstance(time_limit, bool)
        if not number or math.isnan(time_limit) or time_limit < 0:
            raise OptionError(f"time_limit is a number of seconds, at least 0, or None; not {time_limit!r}")


def solve(
    model: LinearModel,
    solver: str,
    *,
    time_limit: float | None = None,
    gap: float = 0.0,
    work: float | None = None,
) -> Solution:
    """Solve a model.

    Args:
        model: minimises its objective column; its start is handed to the solver.
        solver: one of :data:`SOLVERS`.
        time_limit: seconds of wall-clock time; the process is ended a moment after.
        gap: an objective so far above the bound is good enough. CBC, which does not tell the bound then, gets
            none.
        work: to stop after, in the measure of :attr:`Solution.work`, so that equal runs end alike.

    Returns:
        The solver's result; ``STOPPED`` without values if its process had to be ended.

    Raises:
        SolverUnavailableError: if it is not installed, or its licence does not take the model.
    """
    require(solver)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="olla_solvers_") as folder:
        request = _request(model, solver, _own_limit(time_limit), gap, work)
        Path(folder, "request.json").write_text(json.dumps(request), encoding="utf-8")
        # Writing a large model takes a while, which counts.
        left = None if time_limit is None else max(0.0, start + time_limit - time.monotonic())
        ended, words = _run_process(folder, left)
        seconds = time.monotonic() - start
        answer = Path(folder, "response.json")
        if not ended:
            return Solution(Outcome.STOPPED, None, None, None, seconds, "ended at its deadline")
        if not answer.exists():
            return Solution(Outcome.FAILED, None, None, None, seconds, words)
        response: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return _solution(response, model, solver, seconds)


def solve_here(
    model: LinearModel,
    solver: str,
    *,
    time_limit: float | None = None,
    gap: float = 0.0,
    work: float | None = None,
) -> Solution:
    """Solve a model as :func:`solve` does, but in this process and its working folder.

    Nobody ends it at its limit. It is for processes that are there to be ended
    (:mod:`olla_solvers.effort.apart`).

    Args:
        model: as of :func:`solve`.
        solver: one of :data:`SOLVERS`.
        time_limit: seconds that the solver is told.
        gap: as of :func:`solve`.
        work: as of :func:`solve`.

    Returns:
        The solver's result.

    Raises:
        SolverUnavailableError: if it is not installed, or its licence does not take the model.
    """
    start = time.monotonic()
    response = solver_process.answered(_request(model, solver, time_limit, gap, work))
    return _solution(response, model, solver, time.monotonic() - start)


def _request(
    model: LinearModel, solver: str, time_limit: float | None, gap: float, work: float | None
) -> dict[str, Any]:
    return {
        "solver": solver,
        "time_limit": time_limit,
        "gap": gap,
        "work": work,
        "model": _to_document(model),
    }


def _solution(response: dict[str, Any], model: LinearModel, solver: str, seconds: float) -> Solution:
    """Return what a solver's process has written."""
    outcome = Outcome(response["status"])
    if outcome is Outcome.UNAVAILABLE:
        raise SolverUnavailableError(f"{_not_installed(solver)} ({response['detail']})")
    if outcome is Outcome.TOO_LARGE:
        raise SolverUnavailableError(_too_large(model))
    values, bound = response.get("values"), response.get("bound")
    if bound is None and outcome is Outcome.STOPPED:
        bound = model.lower[model.objective]
    return Solution(
        outcome,
        None if values is None else tuple(values),
        response.get("objective"),
        bound,
        seconds,
        response["detail"],
        response.get("work", 0.0),
    )


def _own_limit(time_limit: float | None) -> float | None:
    """Return the limit that a solver is told, which leaves it time to hand over its best solution."""
    return None if time_limit is None else max(time_limit / 2, time_limit - 2)


def _run_process(folder: str, time_limit: float | None) -> tuple[bool, str]:
    """Return True if the solver's process ended by itself, and its error output."""
    arguments = ("request.json", "response.json")
    code, words = run_module("olla_solvers.ilp.solver_process", arguments, folder, time_limit)
    return code is not None, words


@cache
def _has_cbc() -> bool:
    """Return True if PuLP can run CBC: 3.x carries it, 4.x has it in an extra.

    Only PuLP knows, which imports all solvers that are installed; a process of its own takes these along.
    """
    code, _ = run_module("olla_solvers.ilp.solver_process", ("--available", "cbc"), os.curdir, None)
    return code == 0


def _to_document(model: LinearModel) -> dict[str, Any]:
    return {
        "lower": model.lower,
        "upper": model.upper,
        "integer": model.integer,
        "start": model.start,
        "objective": model.objective,
        "rows": [[row.terms, row.sense, row.right] for row in model.rows],
    }


def _not_installed(solver: str) -> str:
    return f"solver {solver!r} is not installed; pip install 'olla-fx[{solver}]'"


def _too_large(model: LinearModel) -> str:
    return (
        f"the model's {len(model.lower)} variables and {len(model.rows)} constraints are too large for the "
        f"Gurobi licence in use (the one that comes with pip takes {FREE_GUROBI_SIZE} of each); use "
        "solver='cbc' (pip install 'olla-fx[cbc]') or install a full Gurobi licence"
    )


def proven_units(solution: Solution, value: int) -> int | None:
    """Return the whole number that a solver proved its objective cannot go below.

    Solvers compute in floating point. If one ended with ``OPTIMAL`` and its objective agrees with the
    exact value of its solution, that value is the bound. Otherwise the bound is rounded up only after a
    millionth is taken off. A bound above the value of a solution contradicts it and is not believed.

    Args:
        solution: what the solver left.
        value: the solution's objective, recomputed in integers.

    Returns:
        The bound, at most ``value``; None if nothing is proven.
    """
    if solution.outcome is Outcome.OPTIMAL and solution.objective is not None:
        if abs(solution.objective - value) <= _RELATIVE_TOLERANCE * max(1000, value):
            return value
    if solution.bound is None or not math.isfinite(solution.bound):
        return None
    slack = _RELATIVE_TOLERANCE * max(1000.0, abs(solution.bound))
    bound = max(0, math.ceil(solution.bound - slack))
    return bound if bound <= value else None


def report_status(outcome: Outcome, *, proven: bool) -> SolverStatus:
    """Return a run's status for a report; a start was known, so there always is an incumbent.

    Args:
        outcome: how the run ended.
        proven: True if the incumbent equals the proven bound.

    Returns:
        The status.
    """
    if proven:
        return SolverStatus.OPTIMAL
    if outcome in (Outcome.STOPPED, Outcome.OPTIMAL):
        return SolverStatus.TIME_LIMIT_WITH_INCUMBENT
    return SolverStatus.FAILED
