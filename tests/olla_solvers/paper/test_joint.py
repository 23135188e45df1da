"""The joint program against every order and placement of tiny problems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, LITERAL
from olla_solvers.order import order
from olla_solvers.paper.joint import MOST_ROWS, joint_plan
from olla_solvers.paper.joint_program import joint_program, rows_needed
from olla_solvers.place import place, spans_of
from olla_solvers.plan import SolverStatus
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.brute_force import smallest_buffer
from tests.olla_solvers.graphs import alexnet_step, mlp_step, problems, smallest_peak

FEW = settings(max_examples=8, deadline=None, derandomize=True)


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """At most five operators and six blocks, some of them aligned."""
    problem = draw(problems(most=5))
    arrays = tuple(replace(array, alignment=draw(st.sampled_from([1, 1, 4, 16]))) for array in problem.arrays)
    problem = replace(problem, arrays=arrays)
    blocks = [span for span in spans_of(problem, order(problem, solver="none").order) if span.size_bytes]
    assume(len(blocks) <= 6)
    return problem


@pytest.mark.parametrize("solver", ["cbc", "highs"])
@pytest.mark.parametrize("name", ["all", "literal"])
def test_no_order_and_placement_is_smaller(solver: str, name: str) -> None:
    techniques = {"all": ALL_TECHNIQUES, "literal": LITERAL}[name]

    @FEW
    @given(tiny_problems())
    def check(problem: Problem) -> None:
        plan = joint_plan(problem, solver=solver, techniques=techniques)
        report = plan.provenance.place_solver
        assert plan.buffer_bytes == report.bound_bytes == smallest_buffer(problem)
        assert plan.buffer_bytes >= smallest_peak(problem)
        assert report.status is SolverStatus.OPTIMAL

    check()


def misaligned() -> Problem:
    """Every order loses bytes to alignment; that with the smallest peak loses more than another one."""
    arrays = (
        Array("a", 2, 0, (3,), alignment=4),
        Array("b", 3, 1, (2, 4)),
        Array("c", 5, 2, (3, 4)),
        Array("d", 9, 3, (5,), alignment=4),
        Array("e", 5, 4, (5,), alignment=4),
    )
    return Problem(tuple(Operator(name) for name in "ABCDEF"), arrays)


@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_order_and_addresses_together_need_less_than_one_after_the_other(solver: str) -> None:
    problem = misaligned()
    joint = joint_plan(problem, solver=solver)
    split = make_plan(problem, solver="highs")
    assert smallest_buffer(problem) == joint.buffer_bytes == 22 < split.buffer_bytes == 25
    assert smallest_peak(problem) == split.peak_bytes == 21
    assert joint.provenance.place_proved_by == f"joint:{solver}"


def test_a_training_step_is_planned_jointly() -> None:
    problem = mlp_step()
    plan = joint_plan(problem, solver="highs", time_limit=60)
    peak = order(problem, solver="none").peak_bytes
    assert plan.buffer_bytes == peak
    assert plan.provenance.place_solver.bound_bytes == peak


def test_pruning_takes_pairs_and_timesteps_away() -> None:
    problem = mlp_step()
    schedule = order(problem, solver="none")
    offsets = place(spans_of(problem, schedule.order), solver="none").offsets
    rows = [
        len(joint_program(problem, schedule.order, offsets, techniques).model.rows)
        for techniques in (ALL_TECHNIQUES, replace(ALL_TECHNIQUES, precedence=False), LITERAL)
    ]
    assert rows[0] < rows[1] < rows[2]


def test_too_large_a_program_is_not_stated() -> None:
    problem = alexnet_step()
    large = Problem(
        tuple(Operator(f"{copy}{operator.name}") for copy in "ab" for operator in problem.operators),
        tuple(
            replace(
                array,
                name=f"{copy}{array.name}",
                producer=None if array.producer is None else array.producer + shift,
                consumers=tuple(reader + shift for reader in array.consumers),
            )
            for copy, shift in (("a", 0), ("b", len(problem.operators)))
            for array in problem.arrays
        ),
    )
    assert rows_needed(large) > MOST_ROWS
    plan = joint_plan(large, solver="highs")
    assert plan.provenance.place_solver.status is SolverStatus.FAILED
    assert "not stated" in plan.provenance.place_solver.detail


def test_no_time_keeps_the_known_plan() -> None:
    plan = joint_plan(mlp_step(), solver="highs", time_limit=0)
    assert plan.provenance.place_solver.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT
    assert plan.provenance.order_found_by == "greedy"
    assert "joint" not in plan.provenance.place_found_by


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(SolverUnavailableError, match="unknown solver"):
        joint_plan(mlp_step(), solver="abacus")
