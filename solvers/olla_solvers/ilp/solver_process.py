"""Runs a solver in a process of its own: reads a model, solves it, writes the solution.

CBC and Gurobi are behind PuLP; HiGHS is not (:mod:`olla_solvers.ilp.highs`).

A process of its own can be ended at its deadline, which CBC, HiGHS and Gurobi overrun, and keeps the
solvers' libraries and their output out of the caller. It is started by :mod:`olla_solvers.ilp.backends` as
``python -m olla_solvers.ilp.solver_process request.json response.json`` in an empty folder; with
``--available cbc`` it only tells, by its exit status, whether PuLP can run a solver.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from olla_solvers.effort.apart import end_with_caller
from olla_solvers.ilp import highs

PULP_NAMES = {"cbc": ("PULP_CBC_CMD", "COIN_CMD"), "gurobi": ("GUROBI",)}
"""Adapters of PuLP for each solver; of several, the first that is available."""

_LOG = "solver.log"
_TOO_LARGE = "too large for size-limited license"


def available_adapter(solver: str) -> str | None:
    """Return the PuLP adapter that can run a solver here, or None."""
    import pulp

    known = set(pulp.listSolvers())
    with warnings.catch_warnings():
        # PuLP 3.3 deprecates the adapter of the CBC that it carries, and 4 has the other one only.
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in PULP_NAMES[solver]:
            if name in known and pulp.getSolver(name, msg=False).available():
                return name
    return None


def main(request_path: str, response_path: str) -> None:
    """Serve one request.

    Args:
        request_path: JSON with ``solver``, ``time_limit``, ``model``, and perhaps ``gap`` and ``work``.
        response_path: where to write the JSON answer.
    """
    end_with_caller()
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    Path(response_path).write_text(json.dumps(answered(request)), encoding="utf-8")


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """Return the response to a request, solved in this process and its working folder.

    Args:
        request: as :func:`main` reads it.
    """
    try:
        return highs.solved(request) if request["solver"] == "highs" else _solved(request)
    except Exception as error:  # the caller decides what each failure means
        text = f"{type(error).__name__}: {error}"
        return {"status": "too_large" if _TOO_LARGE in text else "failed", "detail": text}


def _solved(request: dict[str, Any]) -> dict[str, Any]:
    """Return the response of a solver behind PuLP."""
    import pulp

    adapter = available_adapter(request["solver"])
    if adapter is None:
        return {"status": "unavailable", "detail": f"PuLP {pulp.__version__} finds no {request['solver']}"}
    problem, columns = _to_pulp(request["model"])
    solver = pulp.getSolver(adapter, **_options(request))
    started = time.monotonic()
    problem.solve(solver)
    time_limit, seconds = request["time_limit"], time.monotonic() - started
    out_of_time = time_limit is not None and seconds >= time_limit
    values = [column.varValue for column in columns]
    response = _response(request["solver"], problem, values, out_of_time=out_of_time)
    return response | {"work": seconds if request["solver"] == "cbc" else problem.solverModel.Work}


def _to_pulp(model: dict[str, Any]) -> tuple[Any, list[Any]]:
    import pulp

    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    columns = []
    bounds = zip(model["lower"], model["upper"], model["integer"], model["start"], strict=True)
    for index, (lower, upper, integer, start) in enumerate(bounds):
        category = pulp.LpInteger if integer else pulp.LpContinuous
        column = pulp.LpVariable(f"x{index}", lower, upper, category)
        if start is not None:
            column.setInitialValue(start)
        columns.append(column)
    problem += columns[model["objective"]] * 1
    senses = {"<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE, "==": pulp.LpConstraintEQ}
    for terms, sense, right in model["rows"]:
        expression = pulp.LpAffineExpression([(columns[column], factor) for column, factor in terms])
        problem += pulp.LpConstraint(expression, senses[sense], rhs=right)
    return problem, columns


def _options(request: dict[str, Any]) -> dict[str, Any]:
    """Return options for a gap, tight integrality, a warm start and no output, in each solver's words."""
    time_limit, work = request["time_limit"], request.get("work")
    if request["solver"] == "cbc":
        tolerance = f"integerTolerance {highs.INTEGER_TOLERANCE}"
        options = {"warmStart": True, "keepFiles": True, "logPath": _LOG, "options": [tolerance]}
        # PuLP's default, elapsed time, makes CBC 2.10 end in a segmentation fault, its log unwritten, if
        # the limit falls into the root node. Its one thread's processor time is never ahead of the clock,
        # and the caller ends what is late. It has no measure of work.
        time_limit = min((limit for limit in (time_limit, work) if limit is not None), default=None)
        return {"msg": False, "timeLimit": time_limit, "timeMode": "cpu", "gapRel": 0, **options}
    gaps = {"MIPGap": 0, "MIPGapAbs": request.get("gap", 0.0), "IntFeasTol": highs.INTEGER_TOLERANCE}
    limits = {} if work is None else {"WorkLimit": work}
    return {"msg": False, "timeLimit": time_limit, "warmStart": True, **gaps, **limits}


def _response(solver: str, problem: Any, values: list[float | None], *, out_of_time: bool) -> dict[str, Any]:
    import pulp

    # The status alone says Optimal for CBC at its limit; only the solution's status tells them apart.
    proven = problem.sol_status == pulp.LpSolutionOptimal
    has_values = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    bound, native, stopped = {"cbc": _cbc_end, "gurobi": _gurobi_end}[solver](problem)
    if solver == "cbc" and out_of_time and problem.status == pulp.LpStatusInfeasible:
        # CBC calls a relaxation infeasible that its limit kept it from solving.
        stopped = True
    if stopped and solver == "gurobi":
        proven, has_values = False, problem.solverModel.SolCount > 0
    if problem.status == pulp.LpStatusInfeasible and not stopped:
        status = "infeasible"
    elif proven and not stopped:
        status = "optimal"
    else:
        status = "stopped" if has_values or stopped else "failed"
    has_values = has_values and status != "infeasible" and all(value is not None for value in values)
    objective = float(pulp.value(problem.objective)) if has_values else None
    return {
        "status": status,
        "values": values if has_values else None,
        "objective": objective,
        "bound": objective if status == "optimal" and bound is None else bound,
        "detail": native,
    }


def _cbc_end(problem: Any) -> tuple[float | None, str, bool]:
    """Return the bound, CBC's own words, and True if it hit its limit, from its log.

    A limit that falls into the root node interrupts the relaxation. What CBC then logs as the bound is the
    objective of a dual that is not feasible, often beyond any solution.
    """
    text = Path(_LOG).read_text(encoding="utf-8", errors="replace")
    result = re.search(r"^Result - (.*)$", text, re.MULTILINE)
    bound = re.search(r"^Lower bound:\s*(\S+)", text, re.MULTILINE)
    words = result.group(1).strip() if result else text.strip().splitlines()[-1] if text.strip() else ""
    stopped = "Stopped" in words
    if stopped and not re.search(r"^Enumerated nodes:\s*[1-9]", text, re.MULTILINE):
        return None, words, stopped
    return float(bound.group(1)) if bound else None, words, stopped


def _gurobi_end(problem: Any) -> tuple[float | None, str, bool]:
    import gurobipy

    model = problem.solverModel
    ended = {gurobipy.GRB.OPTIMAL: "optimal", gurobipy.GRB.INFEASIBLE: "infeasible"}
    words = ended.get(model.Status, f"stopped with status {model.Status}")
    has_bound = model.Status != gurobipy.GRB.INFEASIBLE
    return (float(model.ObjBound) if has_bound else None), words, model.Status not in ended


if __name__ == "__main__":
    if sys.argv[1] == "--available":
        sys.exit(available_adapter(sys.argv[2]) is None)
    main(sys.argv[1], sys.argv[2])
