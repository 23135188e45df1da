"""Runs a solver in a process of its own: reads a model, solves it with PuLP, writes the solution.

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

PULP_NAMES = {"cbc": ("PULP_CBC_CMD", "COIN_CMD"), "gurobi": ("GUROBI",), "highs": ("HiGHS",)}
"""Adapters of PuLP for each solver; of several, the first that is available."""

_LOG = "solver.log"
_INTEGER_TOLERANCE = 1e-9
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
        request_path: JSON with ``solver``, ``time_limit``, ``model`` and perhaps ``gap``.
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
        return _solve(request)
    except Exception as error:  # the caller decides what each failure means
        text = f"{type(error).__name__}: {error}"
        return {"status": "too_large" if _TOO_LARGE in text else "failed", "detail": text}


def _solve(request: dict[str, Any]) -> dict[str, Any]:
    import pulp

    adapter = available_adapter(request["solver"])
    if adapter is None:
        return {"status": "unavailable", "detail": f"PuLP {pulp.__version__} finds no {request['solver']}"}
    problem, columns = _to_pulp(request["model"])
    solver = pulp.getSolver(
        adapter, **_options(request["solver"], request["time_limit"], request.get("gap", 0.0))
    )
    if request["solver"] == "highs":
        solver.callSolver = _start_highs
    started = time.monotonic()
    problem.solve(solver)
    time_limit = request["time_limit"]
    out_of_time = time_limit is not None and time.monotonic() - started >= time_limit
    values = [column.varValue for column in columns]
    return _response(request["solver"], problem, values, out_of_time=out_of_time)


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


def _options(solver: str, time_limit: float | None, gap: float) -> dict[str, Any]:
    """Return options for a gap, tight integrality, a warm start and no output, in each solver's words."""
    if solver == "cbc":
        tolerance = f"integerTolerance {_INTEGER_TOLERANCE}"
        options = {"warmStart": True, "keepFiles": True, "logPath": _LOG, "options": [tolerance]}
        # PuLP's default, elapsed time, makes CBC 2.10 end in a segmentation fault, its log unwritten, if
        # the limit falls into the root node. Its one thread's processor time is never ahead of the clock,
        # and the caller ends what is late.
        return {"msg": False, "timeLimit": time_limit, "timeMode": "cpu", "gapRel": 0, **options}
    if solver == "highs":
        tolerance_name = "mip_feasibility_tolerance"
        return {
            "msg": False,
            "timeLimit": time_limit,
            "gapRel": 0,
            "gapAbs": gap,
            tolerance_name: _INTEGER_TOLERANCE,
        }
    options = {"warmStart": True, "MIPGap": 0, "MIPGapAbs": gap, "IntFeasTol": _INTEGER_TOLERANCE}
    return {"msg": False, "timeLimit": time_limit, **options}


def _start_highs(problem: Any) -> None:
    """Give HiGHS the start that PuLP's adapter leaves out, then run it."""
    import highspy

    values = [column.varValue for column in problem.variables()]
    if all(value is not None for value in values):
        solution = highspy.HighsSolution()
        solution.col_value = values
        problem.solverModel.setSolution(solution)
    problem.solverModel.run()


def _response(solver: str, problem: Any, values: list[float | None], *, out_of_time: bool) -> dict[str, Any]:
    import pulp

    # The status alone says Optimal for CBC at its limit; only the solution's status tells them apart.
    proven = problem.sol_status == pulp.LpSolutionOptimal
    has_values = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    bound, native, stopped = {"cbc": _cbc_end, "highs": _highs_end, "gurobi": _gurobi_end}[solver](problem)
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


def _highs_end(problem: Any) -> tuple[float | None, str, bool]:
    import highspy

    status = problem.solverModel.getModelStatus()
    bound = float(problem.solverModel.getInfo().mip_dual_bound)
    ended = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    return bound, problem.solverModel.modelStatusToString(status), status not in ended


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
