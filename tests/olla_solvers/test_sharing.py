"""Results over arguments: the choice is the best of all orders with all pairs, and its bound holds."""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.analysis import peak_bytes
from olla_solvers.errors import ProblemError
from olla_solvers.order import order
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from olla_solvers.sharing import allowed_pairs, choose_pairs, relaxed, taken_over
from olla_solvers.validate import validate
from tests.olla_solvers.brute_force import executable_orders

proven = partial(order, time_limit=20.0)
MANY = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def problems_with_pairs(draw, most=6):
    """Small problems in which many arrays have one size, and some of the pairs that they allow."""
    count = draw(st.integers(2, most))
    operators = tuple(Operator(f"op{i}", draw(st.sampled_from([0, 0, 0, 5]))) for i in range(count))
    arrays = []
    for producer in range(count):
        for number in range(draw(st.integers(1, 2)) if producer else 2):
            later = range(producer + 1, count)
            readers = tuple(sorted(draw(st.sets(st.sampled_from(later), max_size=3)))) if later else ()
            size = draw(st.sampled_from([8, 8, 8, 20]))
            arrays.append(Array(f"array{producer}_{number}", size, producer, readers))
    problem = Problem(operators, tuple(arrays))
    possible = [
        (read, made)
        for read, made in itertools.permutations(range(len(arrays)), 2)
        if arrays[made].producer in arrays[read].consumers
        and arrays[read].size_bytes == arrays[made].size_bytes
    ]
    pairs = draw(st.lists(st.sampled_from(possible), unique=True, max_size=5)) if possible else []
    return problem, tuple(pairs)


def peak_with(problem, sequence, pairs):
    """The peak of an order with pairs, which are one array when taken over; None if that cannot be."""
    at = {operator: timestep for timestep, operator in enumerate(sequence)}
    spans = [
        (at[array.producer], max((at[reader] for reader in array.consumers), default=at[array.producer]))
        for array in problem.arrays
    ]
    for read, made in pairs:
        if spans[read][1] != spans[made][0]:
            return None
    peak = 0
    for timestep, operator in enumerate(sequence):
        alive = problem.operators[operator].workspace_bytes
        for array, (first, last) in zip(problem.arrays, spans, strict=True):
            alive += array.size_bytes if first <= timestep <= last else 0
        for _, made in pairs:
            alive -= problem.arrays[made].size_bytes if spans[made][0] == timestep else 0
        peak = max(peak, alive)
    return peak


def choices(pairs):
    """All sets of pairs that take over no array twice, and make none in two places."""
    for count in range(len(pairs) + 1):
        for chosen in itertools.combinations(pairs, count):
            reads, makes = zip(*chosen, strict=True) if chosen else ((), ())
            if len(set(reads)) == len(set(makes)) == count:
                yield chosen


@MANY
@given(problems_with_pairs())
def test_the_choice_is_the_best_of_all(example):
    problem, pairs = example
    peaks = [
        peak
        for sequence in executable_orders(problem)
        for chosen in choices(pairs)
        if (peak := peak_with(problem, sequence, chosen)) is not None
    ]
    plain = proven(problem)
    choice = choose_pairs(problem, pairs, plain, proven, most_orders=1000)
    assert choice.schedule.peak_bytes == min(peaks)
    assert peak_with(problem, choice.schedule.order, choice.pairs) == min(peaks)
    if choice.pairs:
        assert choice.schedule.lower_bound_bytes == min(peaks)
    assert proven(relaxed(problem, pairs)).peak_bytes <= min(peaks) if pairs else True


@MANY
@given(problems_with_pairs(), st.integers(0, 3))
def test_bounds_hold_if_few_problems_are_ordered(example, most_orders):
    problem, pairs = example
    plain = proven(problem)
    best = choose_pairs(problem, pairs, plain, proven, most_orders=1000).schedule.peak_bytes
    choice = choose_pairs(problem, pairs, plain, proven, most_orders=most_orders)
    assert choice.schedule.peak_bytes >= best
    if choice.pairs:
        assert choice.schedule.lower_bound_bytes <= best


@MANY
@given(problems_with_pairs())
def test_what_is_taken_over_is_one_array(example):
    """For every order: the problem in which pairs are taken allows it just if they do, at its cost."""
    problem, pairs = example
    for chosen in choices(pairs):
        try:
            shared = taken_over(problem, chosen)
        except ProblemError:
            assert not any(peak_with(problem, sequence, chosen) for sequence in executable_orders(problem))
            continue
        assert len(shared.arrays) == len(problem.arrays) - len(chosen)
        for sequence in itertools.islice(executable_orders(problem), 50):
            peak = peak_with(problem, sequence, chosen)
            assert shared.is_executable(sequence) == (peak is not None)
            if peak is not None:
                assert peak_bytes(shared, sequence) == peak
                assert set(chosen) <= set(allowed_pairs(problem, sequence, chosen))


def gate(size=8):
    """A value with two readers, either of which may be written over it, if it comes last."""
    operators = tuple(map(Operator, ("value", "wave", "bell", "sum")))
    arrays = (
        Array("value", size, 0, (1, 2)),
        Array("wave", size, 1, (3,)),
        Array("bell", size, 2, (3,)),
    )
    return Problem(operators, arrays), ((0, 1), (0, 2))


def test_one_of_two_readers_takes_over():
    problem, pairs = gate()
    plain = order(problem)
    assert plain.peak_bytes == 24
    choice = choose_pairs(problem, pairs, plain, order)
    assert (len(choice.pairs), choice.schedule.peak_bytes, choice.schedule.lower_bound_bytes) == (1, 16, 16)
    shared = taken_over(problem, choice.pairs)
    plan = make_plan(shared)
    validate(shared, plan)
    assert plan.buffer_bytes == 16


def test_nothing_is_ordered_if_the_bound_tells_that_nothing_can_be_gained():
    problem, pairs = gate()
    wide = Problem(
        (*problem.operators, Operator("workspace", 100)), problem.arrays, ((3, 4),)
    )  # fmt: skip
    plain = order(wide)

    def unexpected(problem):
        raise AssertionError("a problem was ordered")

    assert choose_pairs(wide, pairs, plain, unexpected).schedule == plain


@pytest.mark.parametrize("change", ["size", "kind", "reader"])
def test_pairs_are_checked(change):
    problem, pairs = gate()
    arrays = list(problem.arrays)
    if change == "size":
        arrays[1] = Array("wave", 9, 1, (3,))
    elif change == "kind":
        arrays[1] = Array("wave", 8, 1, (3,), ArrayKind.OUTPUT)
    else:
        arrays[0] = Array("value", 8, 0, (2,))
    other = Problem(problem.operators, tuple(arrays))
    with pytest.raises(ProblemError, match="cannot be written over"):
        choose_pairs(other, pairs, order(other), order)
