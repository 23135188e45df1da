"""What is alive at a pause lies lowest, and what is left at the end highest, in a plan that stays valid."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.pauses import held_at, place_at_ends
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from olla_solvers.spans import spans_of
from olla_solvers.validate import validate
from tests.olla_solvers.graphs import problems


def alive_at(problem, plan, operator):
    """Return name, bytes and offset of what is alive while an operator runs."""
    spans = spans_of(problem, problem.indices_of(plan.order))
    at = plan.order.index(operator)
    offsets = {**plan.offsets, **{f"workspace of {name}": at for name, at in plan.workspace_offsets.items()}}
    return [
        (span.name, span.size_bytes, offsets[span.name])
        for span in spans
        if span.size_bytes and span.lower <= at < span.upper
    ]


@settings(deadline=None)
@given(problems(), st.data())
def test_plans_of_random_problems(problem, data):
    plan = make_plan(problem, solver="none")
    pause = data.draw(st.sampled_from([None, *plan.order]))
    end = data.draw(st.sampled_from([None, *plan.order]))
    most_bytes = plan.buffer_bytes + data.draw(st.integers(0, 64))
    moved = place_at_ends(problem, plan, pause, end, most_bytes)
    if moved is None:
        return
    validate(problem, moved)
    assert moved.buffer_bytes <= most_bytes
    assert moved.order == plan.order
    assert (moved.peak_bytes, moved.lower_bound_bytes) == (plan.peak_bytes, plan.lower_bound_bytes)
    low = alive_at(problem, moved, pause) if pause else []
    if low:
        first, last = held_at(problem, moved, pause)
        assert first == min(offset for _, _, offset in low)
        assert last == max(offset + size for _, size, offset in low)


def chain(sizes):
    """Return a forward that saves everything, a pause, and a backward that makes gradients of these sizes."""
    operators, arrays = [], []
    count = len(sizes)
    for step, size in enumerate(sizes):
        operators.append(Operator(f"forward {step}"))
        arrays.append(Array(f"saved {step}", size, step, (2 * count - step,), ArrayKind.PLANNED))
    operators.append(Operator("pause"))
    for step in range(count):
        operators.append(Operator(f"backward {step}"))
        arrays.append(
            Array(f"gradient {step}", sizes[-1 - step], count + 1 + step, (2 * count + 1,), ArrayKind.PLANNED)
        )
    operators.append(Operator("end"))
    before = tuple((step, step + 1) for step in range(len(operators) - 1))
    return Problem(tuple(operators), tuple(arrays), before)


def test_both_stacks_of_a_forward_and_its_backward():
    sizes = [64, 512, 128, 256]
    problem = chain(sizes)
    plan = make_plan(problem, solver="none")
    moved = place_at_ends(problem, plan, "pause", "end", plan.buffer_bytes)
    assert held_at(problem, moved, "pause") == (0, sum(sizes))
    low, high = held_at(problem, moved, "end")
    assert high - low == sum(sizes)
    assert high == moved.buffer_bytes == plan.buffer_bytes
    assert moved.provenance.place_proved_by == plan.provenance.place_proved_by
    # Not larger than needed, if it might be.
    assert place_at_ends(problem, plan, "pause", "end", plan.buffer_bytes + 640) == moved


def test_nothing_to_gather():
    problem = chain([64, 128])
    plan = make_plan(problem, solver="none")
    assert place_at_ends(problem, plan, None, None, plan.buffer_bytes) is None
    assert place_at_ends(problem, plan, "pause", None, plan.buffer_bytes - 1) is None
    assert held_at(problem, replace(plan), "forward 0") == (
        plan.offsets["saved 0"],
        plan.offsets["saved 0"] + 64,
    )
