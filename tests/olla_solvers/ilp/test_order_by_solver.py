"""Orders by named solvers against exhaustive enumeration, and their time limits."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings

from olla_solvers.analysis import peak_bytes
from olla_solvers.errors import SolverUnavailableError
from olla_solvers.graph.flow import flow_of
from olla_solvers.ilp import backends
from olla_solvers.order import order
from olla_solvers.order.greedy import best_order
from olla_solvers.plan import SolverEffect, SolverStatus
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import alexnet_step, mlp_step, precedence_bound, problems, smallest_peak

FEW = settings(max_examples=12, deadline=None, derandomize=True)


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_the_program_finds_the_optimum(solver: str) -> None:
    @FEW
    @given(problems())
    def check(problem: Problem) -> None:
        schedule = order(problem, solver=solver)
        assert schedule.peak_bytes == smallest_peak(problem) == schedule.lower_bound_bytes
        assert schedule.solver.status is SolverStatus.OPTIMAL
        assert schedule.solver.bound_bytes == schedule.peak_bytes
        assert schedule.solver.variables > 0

    check()


@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_alexnet_is_proven_by_every_solver(solver: str) -> None:
    problem = alexnet_step()
    assert len(problem.operators) == 69
    captured = peak_bytes(problem, problem.captured_order)
    schedule = order(problem, solver=solver)
    assert schedule.is_optimal
    assert schedule.peak_bytes < captured * 0.7
    assert schedule.solver.status is SolverStatus.OPTIMAL
    assert schedule.solver.effect is SolverEffect.CONFIRMED
    assert schedule.solver.gap == 0


def test_gurobi_solves_the_mlp() -> None:
    schedule = order(mlp_step(), solver="gurobi")
    assert schedule.is_optimal
    assert schedule.solver.solver == "gurobi"
    assert schedule.solver.status is SolverStatus.OPTIMAL


def test_gurobi_beyond_its_licence_names_cbc() -> None:
    with pytest.raises(SolverUnavailableError, match=r"too large .* solver='cbc'"):
        order(crossed(40), solver="gurobi")


def crossed(width: int) -> Problem:
    """Two layers in which every operator of the second reads three of the first: nothing contracts."""
    operators = [Operator(f"make{i}") for i in range(width)] + [Operator(f"use{i}") for i in range(width)]
    arrays = [
        Array(f"a{i}", 50 + 13 * i % 29, i, tuple(sorted({width + (i + k) % width for k in (0, 1, 5)})))
        for i in range(width)
    ]
    end = len(operators)
    arrays += [Array(f"b{i}", 40 + 11 * i % 37, width + i, (end,)) for i in range(width)]
    return Problem((*operators, Operator("end")), tuple(arrays))


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_a_time_limit_keeps_the_incumbent(solver: str) -> None:
    problem = crossed(22)
    flow, _ = flow_of(problem)
    greedy = best_order(flow, 0, float("inf"))
    start = time.monotonic()
    schedule = order(problem, solver=solver, time_limit=2)
    assert time.monotonic() - start < 5
    assert problem.is_executable(schedule.order)
    assert schedule.peak_bytes <= greedy.peak_bytes
    assert schedule.lower_bound_bytes >= precedence_bound(problem)
    assert schedule.solver.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT


def test_a_program_that_takes_too_long_to_state_is_not_waited_for() -> None:
    problem = crossed(130)
    start = time.monotonic()
    schedule = order(problem, solver="highs", time_limit=0.3)
    assert time.monotonic() - start < 3
    assert schedule.solver.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT
    assert "not given to highs" in schedule.solver.detail
    assert problem.is_executable(schedule.order)


def test_cbc_survives_a_limit_in_its_root_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (1.0, 2.0, 4.0, 8.0):  # a slow machine may not even reach the root node in the first
        monkeypatch.setattr(backends, "_own_limit", lambda time_limit, seconds=seconds: seconds)
        report = order(crossed(22), solver="cbc", time_limit=30).solver
        assert report.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT
        if report.detail == "Stopped on time limit":
            break
    assert report.detail == "Stopped on time limit"
    assert report.bound_bytes is not None
