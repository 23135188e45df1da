"""Solvers of integer programs: availability, licences, statuses, deadlines, and what importing loads."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pulp
import pytest

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp import backends, solver_process
from olla_solvers.ilp.backends import Outcome, Solution
from olla_solvers.ilp.model import Expression, LinearModel
from olla_solvers.plan import SolverStatus

ALL = ("cbc", "highs", "gurobi")

IMPORTS = """
import pathlib, pkgutil, sys
import olla_solvers
for module in pkgutil.walk_packages(olla_solvers.__path__, "olla_solvers."):
    __import__(module.name)
olla_solvers.ilp.backends.available_solvers()
print(*sorted({"torch", "pulp", "gurobipy", "highspy"} & set(sys.modules)))
"""


def knapsack() -> LinearModel:
    """Minimise y with y >= 10 - 3a - 4b - 5c and at most two of a, b, c: the answer is 1."""
    model = LinearModel()
    model.objective = model.column(0, 100)
    chosen = [model.binary() for _ in range(3)]
    weights = zip(chosen, (3, 4, 5), strict=True)
    model.require(Expression([(model.objective, 1), *((column, w) for column, w in weights)]), ">=", 10)
    model.require(Expression((column, 1) for column in chosen), "<=", 2)
    return model


def test_bounds_of_whole_columns_are_whole() -> None:
    model = LinearModel()
    whole, any_number = model.column(1.25, 6.75, integer=True), model.column(1.25, 6.75)
    assert (model.lower[whole], model.upper[whole]) == (2, 6)
    assert (model.lower[any_number], model.upper[any_number]) == (1.25, 6.75)


def test_importing_loads_neither_torch_nor_a_solver() -> None:
    root = Path(backends.__file__).resolve().parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{IMPORTS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("solver", ALL)
def test_every_solver_solves(solver: str) -> None:
    solution = backends.solve(knapsack(), solver, time_limit=30)
    assert solution.outcome is Outcome.OPTIMAL
    assert solution.objective == pytest.approx(1)
    assert solution.bound == pytest.approx(1)
    assert solution.values is not None
    assert [round(value) for value in solution.values] == [1, 0, 1, 1]


@pytest.mark.parametrize("solver", ALL)
def test_a_start_is_accepted(solver: str) -> None:
    model = knapsack()
    model.start = [1, 0, 1, 1]
    assert backends.solve(model, solver, time_limit=30).objective == pytest.approx(1)


@pytest.mark.parametrize("solver", ALL)
def test_an_infeasible_model_is_told_apart(solver: str) -> None:
    model = knapsack()
    model.require(Expression([(0, 1), (1, 1)]), "<=", 0.5)
    model.require(Expression([(0, 1), (1, 1)]), ">=", 0.6)
    solution = backends.solve(model, solver, time_limit=30)
    assert solution.outcome is Outcome.INFEASIBLE
    assert solution.values is None


@pytest.mark.parametrize(("out_of_time", "status"), [(True, "stopped"), (False, "infeasible")])
def test_what_cbc_calls_infeasible_at_its_limit_is_not_believed(
    out_of_time: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CBC's log says this if the limit falls into the first relaxation, which happens by chance."""
    monkeypatch.chdir(tmp_path)
    Path("solver.log").write_text("Presolve ...\nResult - Linear relaxation infeasible\n", encoding="utf-8")
    problem = pulp.LpProblem("any", pulp.LpMinimize)
    problem.status, problem.sol_status = pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible
    response = solver_process._response("cbc", problem, [None], out_of_time=out_of_time)
    assert response["status"] == status
    assert response["values"] is None


@pytest.mark.parametrize(("nodes", "bound"), [("0", None), ("31", 7500.5)])
def test_the_bound_of_cbc_at_its_limit_is_believed_only_where_it_branched(
    nodes: str, bound: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relaxation that its limit interrupts leaves an infeasible dual, which bounds nothing."""
    monkeypatch.chdir(tmp_path)
    lower = "67923106310678.000" if nodes == "0" else "7500.500"
    log = f"\nResult - Stopped on time limit\n\nLower bound:  {lower}\nEnumerated nodes:  {nodes}\n"
    Path("solver.log").write_text(log, encoding="utf-8")
    problem = pulp.LpProblem("any", pulp.LpMinimize)
    problem.status, problem.sol_status = pulp.LpStatusOptimal, pulp.LpSolutionNoSolutionFound
    response = solver_process._response("cbc", problem, [None], out_of_time=True)
    assert response["status"] == "stopped"
    assert response["bound"] == bound


def test_available_solvers_are_the_installed_ones() -> None:
    assert set(backends.available_solvers()) == set(ALL)


def test_a_missing_solver_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._MODULES, "gurobi", "no_such_module")
    with pytest.raises(SolverUnavailableError, match=r"pip install 'olla-fx\[gurobi\]'"):
        backends.require("gurobi")
    assert "gurobi" not in backends.available_solvers()


def test_an_unknown_solver_names_the_known_ones() -> None:
    with pytest.raises(SolverUnavailableError, match=r"unknown solver 'cplex'; one of auto, cbc"):
        backends.require("cplex")


def test_licence_is_apart_from_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRB_LICENSE_FILE", str(tmp_path / "none.lic"))
    assert backends.is_installed("gurobi")
    assert backends.may_take("gurobi", 2000, 2000)
    assert not backends.may_take("gurobi", 2001, 10)
    assert backends.may_take("cbc", 10**6, 10**6)
    (tmp_path / "none.lic").write_text("")
    assert backends.may_take("gurobi", 2001, 10)


@pytest.mark.parametrize("takes", [True, False])
def test_gurobi_is_asked_what_its_licence_takes(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(model: LinearModel, solver: str) -> Solution:
        assert len(model.lower) > backends.FREE_GUROBI_SIZE
        if not takes:
            raise SolverUnavailableError("too large")
        return Solution(Outcome.OPTIMAL, None, None, None, 0.0, "")

    monkeypatch.setattr(backends, "solve", solve)
    assert backends.takes_any_size.__wrapped__("gurobi") is takes
    assert backends.takes_any_size.__wrapped__("highs")


def test_the_process_is_ended_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_own_limit", lambda limit: None)
    start = time.monotonic()
    solution = backends.solve(hard(), "cbc", time_limit=1)
    assert solution.outcome is Outcome.STOPPED
    assert solution.values is None
    assert time.monotonic() - start < 4


def test_highs_ends_alike_after_some_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [backends.solve_here(hard(), "highs", work=work) for work in (0.05, 0.05, 0.2)]
    assert [run.outcome for run in runs] == [Outcome.STOPPED] * 3
    assert (runs[0].values, runs[0].bound, runs[0].work) == (runs[1].values, runs[1].bound, runs[1].work)
    assert runs[0].work < runs[2].work


def hard() -> LinearModel:
    """Market split: equalities over many binaries, which branch and bound hardly prunes."""
    model = LinearModel()
    slacks = [model.column(0, 10**6) for _ in range(8)]
    model.objective = model.column(0, 10**7)
    columns = [model.binary() for _ in range(40)]
    for row, slack in enumerate(slacks):
        weights = [(37 * (row + 3) * (index + 7) ** 2 + 11 * index) % 100 for index in range(40)]
        total = Expression(zip(columns, weights, strict=True))
        total.add(slack, 1)
        total.add(slacks[(row + 1) % 8], -1)
        model.require(total, "==", sum(weights) // 2)
    model.require(Expression([(model.objective, -1), *((slack, 1) for slack in slacks)]), "<=", 0)
    return model


@pytest.mark.parametrize(
    ("outcome", "objective", "bound", "expected"),
    [
        (Outcome.OPTIMAL, 1000.0000001, 1000.0, 1000),
        (Outcome.OPTIMAL, 990.0, 990.0, 990),
        (Outcome.STOPPED, 1000.0, 900.2, 901),
        (Outcome.STOPPED, 1000.0, 1000.0001, 1000),
        (Outcome.STOPPED, None, 5000.0, None),
        (Outcome.STOPPED, None, float("-inf"), None),
        (Outcome.FAILED, None, None, None),
    ],
)
def test_bounds_are_rounded_with_care(
    outcome: Outcome, objective: float | None, bound: float | None, expected: int | None
) -> None:
    assert backends.proven_units(Solution(outcome, None, objective, bound, 0, ""), 1000) == expected


def test_a_stopped_run_is_a_success_with_a_gap() -> None:
    assert backends.report_status(Outcome.STOPPED, proven=False) is SolverStatus.TIME_LIMIT_WITH_INCUMBENT
    assert backends.report_status(Outcome.STOPPED, proven=True) is SolverStatus.OPTIMAL
    assert backends.report_status(Outcome.FAILED, proven=False) is SolverStatus.FAILED
