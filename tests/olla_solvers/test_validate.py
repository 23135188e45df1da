"""The oracle accepts good plans and names what is wrong in each kind of bad one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from olla_solvers.errors import ValidationError
from olla_solvers.plan import MemoryPlan
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from olla_solvers.validate import validate
from tests.olla_solvers.graphs import mlp_step, problems

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def scratch_problem() -> Problem:
    """A makes x (read by C) and y (read by B); B has a workspace and makes an unread z; D reads nothing."""
    return Problem(
        (Operator("A"), Operator("B", workspace_bytes=32), Operator("C"), Operator("D")),
        (
            Array("x", 64, 0, (2,), alignment=64),
            Array("y", 16, 0, (1,)),
            Array("z", 8, 1),
            Array("out", 100, 2, (), ArrayKind.OUTPUT),
            Array("w", 100, None, (0, 1), ArrayKind.STATIC),
        ),
        ((1, 3),),
    )


GOOD = make_plan(scratch_problem(), solver="none")


def moved(name: str, offset: int) -> Callable[[MemoryPlan], MemoryPlan]:
    return lambda plan: replace(plan, offsets={**plan.offsets, name: offset})


def reordered(*names: str) -> Callable[[MemoryPlan], MemoryPlan]:
    return lambda plan: replace(plan, order=names)


def test_a_good_plan_passes() -> None:
    validate(scratch_problem(), GOOD)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (reordered("A", "B", "C"), "never runs operator 'D'"),
        (reordered("A", "B", "C", "D", "D"), "'D' twice"),
        (reordered("A", "B", "C", "E"), "'E', which the problem does not have"),
        (reordered("C", "A", "B", "D"), r"'C' runs at timestep 0, but it reads array 'x' of operator 'A'"),
        (reordered("A", "D", "B", "C"), r"'D' runs at timestep 1, but it must wait for operator 'B'"),
        (lambda plan: replace(plan, offsets={"x": 0, "y": 64}), "'z' has no offset"),
        (moved("out", 0), "'out' has an offset but is no planned array"),
        (moved("w", 0), "'w' has an offset"),
        (lambda plan: replace(plan, workspace_offsets={}), "'B' needs a workspace"),
        (lambda plan: replace(plan, workspace_offsets={"A": 0, "B": 80}), "'A' has a workspace offset"),
        (moved("y", -1), r"array 'y' at \[-1, 15\) B lies outside"),
        (moved("y", 1000), "array 'y' .* lies outside the buffer"),
        (moved("x", 8), "'x' is at offset 8 B, not a multiple of its alignment 64"),
        (lambda plan: replace(plan, peak_bytes=plan.peak_bytes - 1), "reports a peak"),
        (lambda plan: replace(plan, lower_bound_bytes=plan.peak_bytes + 1), "lower bound"),
        (lambda plan: replace(plan, buffer_bytes=plan.peak_bytes - 1), "outside the buffer"),
    ],
)
def test_each_violation_is_named(spoil: Callable[[MemoryPlan], MemoryPlan], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        validate(scratch_problem(), spoil(GOOD))


def test_overlapping_arrays_are_both_named() -> None:
    with pytest.raises(ValidationError, match=r"array 'x'.*array 'y'.*timestep 0"):
        validate(scratch_problem(), moved("y", GOOD.offsets["x"])(GOOD))


def test_a_workspace_may_not_overlap_an_array() -> None:
    bad = replace(GOOD, workspace_offsets={"B": GOOD.offsets["y"]}, buffer_bytes=1000)
    with pytest.raises(ValidationError, match=r"array 'y'.*workspace of operator 'B'"):
        validate(scratch_problem(), bad)


def test_zero_size_arrays_never_conflict() -> None:
    problem = Problem((Operator("A"), Operator("B")), (Array("x", 0, 0, (1,)), Array("y", 4, 0, (1,))))
    plan = make_plan(problem, solver="none")
    validate(problem, replace(plan, offsets={"x": 2, "y": 0}))


def test_five_thousand_arrays_take_less_than_a_second() -> None:
    count = 5000
    operators = tuple(Operator(f"op{i}") for i in range(count))
    arrays = tuple(Array(f"a{i}", 64, i, (count - 1,) if i < count - 1 else ()) for i in range(count))
    problem = Problem(operators, arrays)
    plan = make_plan(problem, solver="none")
    start = time.perf_counter()
    validate(problem, plan)
    assert time.perf_counter() - start < 1


@SETTINGS
@given(problems())
def test_random_plans_pass(problem: Problem) -> None:
    validate(problem, make_plan(problem, solver="none"))


def test_mlp_plan_is_optimal_and_free_of_fragmentation() -> None:
    plan = make_plan(mlp_step(), solver="none")
    assert plan.is_optimal
    assert plan.fragmentation == 0
    assert set(plan.timings) == {"order", "place"}
