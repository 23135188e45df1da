"""Solves one program with HiGHS by its own interface, which takes a program as arrays.

PuLP would state it once more, name by name, which takes longer than HiGHS needs for programs of some hundred
columns. HiGHS knows no measure of work to stop at that is the same on any machine, but it asks at fixed
points of its search whether it is to stop; these are counted.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

WORK_OF_CHECK, WORK_OF_CHECK_IN_TREE = 1e-4, 4e-5
"""Seconds between two questions, times the square root of the number of coefficients, before HiGHS branches
and afterwards: about the medians over a hundred programs that planning repetitions has stated."""

INTEGER_TOLERANCE = 1e-9
"""By which a whole number may be missed."""


def solved(request: dict[str, Any]) -> dict[str, Any]:
    """Return the response to a request.

    Args:
        request: as :func:`olla_solvers.ilp.solver_process.main` reads it.

    Raises:
        RuntimeError: if HiGHS does.
    """
    try:
        import highspy
    except ImportError as error:
        return {"status": "unavailable", "detail": str(error)}
    model = request["model"]
    highs = highspy.Highs()
    _set_options(highs, request)
    if highs.passModel(_program(model)) == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS does not take the program")
    if all(value is not None for value in model["start"]):
        start = highspy.HighsSolution()
        start.col_value = model["start"]
        highs.setSolution(start)
    checks = _Checks(model, request.get("work"))
    highs.cbMipInterrupt.subscribe(checks.look)
    if highs.run() == highspy.HighsStatus.kError:
        raise RuntimeError(f"HiGHS ended with {highs.modelStatusToString(highs.getModelStatus())}")
    return _response(highs, model) | {"work": checks.work}


class _Checks:
    """Counts how often HiGHS asks whether to stop, and has it stop.

    Attributes:
        work: so far.
    """

    def __init__(self, model: dict[str, Any], most: float | None) -> None:
        self.work = 0.0
        self._size = math.sqrt(sum(len(terms) for terms, _, _ in model["rows"]))
        self._most = math.inf if most is None else most

    def look(self, event: Any) -> None:
        """Note one question, and answer it."""
        has_branched = event.data_out.mip_node_count > 0
        self.work += self._size * (WORK_OF_CHECK_IN_TREE if has_branched else WORK_OF_CHECK)
        if self.work >= self._most:
            event.data_in.user_interrupt = True


def _set_options(highs: Any, request: dict[str, Any]) -> None:
    options = {
        "output_flag": False,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": float(request.get("gap", 0.0)),
        "mip_feasibility_tolerance": INTEGER_TOLERANCE,
    }
    if request["time_limit"] is not None:
        options["time_limit"] = float(request["time_limit"])
    for name, value in options.items():
        highs.setOptionValue(name, value)


def _program(model: dict[str, Any]) -> Any:
    """Return a model in the form that HiGHS takes."""
    import highspy

    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(model["lower"]), len(model["rows"])
    program.col_cost_ = [float(column == model["objective"]) for column in range(len(model["lower"]))]
    program.col_lower_, program.col_upper_ = model["lower"], model["upper"]
    kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
    program.integrality_ = [kinds[is_integer] for is_integer in model["integer"]]
    program.row_lower_ = [right if sense != "<=" else -math.inf for _, sense, right in model["rows"]]
    program.row_upper_ = [right if sense != ">=" else math.inf for _, sense, right in model["rows"]]
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = [0, *accumulate(len(terms) for terms, _, _ in model["rows"])]
    matrix.index_ = [column for terms, _, _ in model["rows"] for column, _ in terms]
    matrix.value_ = [float(factor) for terms, _, _ in model["rows"] for _, factor in terms]
    return program


def _response(highs: Any, model: dict[str, Any]) -> dict[str, Any]:
    import highspy

    status, info = highs.getModelStatus(), highs.getInfo()
    ended = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInfeasible: "infeasible",
    }.get(status, "stopped")
    feasible = int(highspy.SolutionStatus.kSolutionStatusFeasible)
    has_values = ended != "infeasible" and info.primal_solution_status == feasible
    values = [float(value) for value in highs.getSolution().col_value] if has_values else None
    objective = None if values is None else values[model["objective"]]
    # HiGHS keeps a bound for programs with whole columns alone.
    is_relaxed = not any(model["integer"])
    bound = objective if is_relaxed and ended == "optimal" else float(info.mip_dual_bound)
    return {
        "status": ended,
        "values": values,
        "objective": objective,
        "bound": None if is_relaxed and ended != "optimal" else bound,
        "detail": highs.modelStatusToString(status),
    }
