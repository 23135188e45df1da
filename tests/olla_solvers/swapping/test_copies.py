"""Arrays that wait on the host are placed there, and the validator finds what breaks their copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from olla_solvers.errors import ProblemError, ValidationError
from olla_solvers.plan_json import plan_from_json, plan_to_json
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from olla_solvers.validate import validate

HOST = ArrayKind.HOST
NAMES = ("make", "out", "large", "gone", "other", "back", "there", "read", "late")


def swapping(*extra_readers: int, chained: bool = True) -> Problem:
    """Two arrays wait on the host one after the other, each while the other is used."""
    operators = [Operator(f"{name} {turn}") for turn in (0, 1) for name in NAMES]
    arrays: list[Array] = []
    for turn in (0, 1):
        make, out, large, gone, other, back, there, read, late = range(9 * turn, 9 * turn + 9)
        extra = extra_readers if turn == 0 else ()
        arrays += [
            Array(f"a{turn}", 64, make, tuple(sorted({out, gone, *extra}))),
            Array(f"h{turn}", 64, out, (gone, back, there), HOST, 64),
            Array(f"x{turn}", 256, large, (other,)),
            Array(f"b{turn}", 64, back, (there, read, late)),
        ]
    before = tuple((first, first + 1) for first in range(len(operators) - 1)) if chained else ()
    return Problem(tuple(operators), tuple(arrays), before, ((1, 3), (5, 6), (10, 12), (14, 15)))


def test_arrays_on_the_host_share_a_buffer_of_their_own() -> None:
    problem = swapping()
    plan = make_plan(problem, solver="none")
    assert plan.peak_bytes == plan.buffer_bytes == 256 + 64
    assert plan.host_bytes == 64
    assert plan.host_offsets == {"h0": 0, "h1": 0}
    validate(problem, plan)
    assert plan_from_json(plan_to_json(plan)) == plan


def test_files_have_copies() -> None:
    problem = swapping()
    assert Problem.from_json(problem.to_json()) == problem
    assert problem.resized([128] * 8, [0] * 18).copies == problem.copies


@pytest.mark.parametrize(
    ("offsets", "host_bytes", "words"),
    [
        ({"h0": 0}, 64, "host array 'h1' has no offset"),
        ({"h0": 0, "h1": 0, "a0": 0}, 64, "'a0' has an offset but is no host array"),
        ({"h0": 0, "h1": 64}, 64, "'h1' .* lies outside the host's buffer"),
        ({"h0": 0, "h1": 32}, 128, "'h1' is at offset 32 B, not a multiple of its alignment 64"),
    ],
)
def test_a_wrong_placement_on_the_host_is_found(offsets: dict[str, int], host_bytes: int, words: str) -> None:
    problem = swapping()
    plan = replace(make_plan(problem, solver="none"), host_offsets=offsets, host_bytes=host_bytes)
    with pytest.raises(ValidationError, match=words):
        validate(problem, plan)


def test_arrays_that_wait_together_do_not_overlap_on_the_host() -> None:
    problem = swapping(chained=False)
    names = [operator.name for operator in problem.operators]
    order = [name for pair in zip(names[:9], names[9:], strict=True) for name in pair]
    plan = make_plan(swapping(), solver="none")
    offsets = {**plan.offsets, "a1": 4096, "x1": 8192, "b1": 4160}
    spread = replace(plan, order=tuple(order), offsets=offsets, buffer_bytes=16384, peak_bytes=640)
    with pytest.raises(ValidationError, match=r"'h0' .* and array 'h1' .* overlap"):
        validate(problem, spread)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 1, 2, 3, 4, 5, 7, 6, 8), "'read 0', at timestep 6, uses array 'b0' before its copy is done"),
        ((0, 1, 2, 4, 5, 3, 6, 7, 8), "'back 0', at timestep 4, uses array 'h0' before its copy is done"),
    ],
)
def test_what_is_copied_is_not_read_before_it_is_there(order: tuple[int, ...], words: str) -> None:
    problem = swapping(chained=False)
    names = [operator.name for operator in problem.operators]
    plan = make_plan(swapping(), solver="none")
    sequence = tuple(names[index] for index in (*order, *range(9, 18)))
    with pytest.raises(ValidationError, match=words):
        validate(problem, replace(plan, order=sequence))


def test_what_is_being_copied_is_not_written() -> None:
    with pytest.raises(ValidationError, match="'large 0', at timestep 2, uses array 'a0' while it is copied"):
        make_plan(swapping(2), solver="none")


@pytest.mark.parametrize("copies", [((0, 3),), ((1, 4),), ((1, 99),)])
def test_copies_have_a_source_and_a_target(copies: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ProblemError, match="cop"):
        replace(swapping(), copies=copies)
