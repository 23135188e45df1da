"""Arrays of the caller that may wait on the host, across two steps as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from olla_solvers.arrays import Array, ArrayKind, Operator
from olla_solvers.errors import ProblemError
from olla_solvers.problem import Problem
from olla_solvers.recomputation.bounds import lower_bound
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.problem import RecomputationProblem
from olla_solvers.swapping.autoswap.planner import AutoSwap
from olla_solvers.swapping.autoswap.scores import Score
from olla_solvers.swapping.autoswap.weights import only
from olla_solvers.swapping.choice import choose
from olla_solvers.swapping.gaps import Gap, part_of, remove
from olla_solvers.swapping.joint_planner import WithinBudgetAndLink
from olla_solvers.swapping.least_time import (
    least_time_of_swaps,
    least_time_with_swaps,
)
from olla_solvers.swapping.plan import plan_of
from olla_solvers.swapping.schedule import within_budget, without_stalls
from olla_solvers.swapping.stays import stays_of
from olla_solvers.swapping.timed_step import TimedStep
from olla_solvers.swapping.timeline import Timeline, timeline
from olla_solvers.swapping.transfers import Link, check
from tests.olla_solvers.recomputation.steps import random_step
from tests.olla_solvers.swapping import swapped_steps
from tests.olla_solvers.swapping.swapped_steps import links, network_step, timed_steps


def lending(step: TimedStep) -> RecomputationProblem:
    """A step in which all that the caller owns may wait, and nothing runs again."""
    arrays = step.problem.arrays
    lent = frozenset(index for index, array in enumerate(arrays) if array.kind is ArrayKind.STATIC)
    return RecomputationProblem(
        problem=step.problem,
        order=step.order,
        seconds=step.seconds,
        makers=tuple(() for _ in arrays),
        phases=tuple(int(2 * operator >= step.length) for operator in range(step.length)),
        lent=lent,
        renewed=step.renewed,
    )


def plain_timeline(problem: RecomputationProblem) -> Timeline:
    instance = prepare(problem)
    return timeline(instance, Evaluator(instance).recomputation(plain_states(instance)).executions)


def output_bytes(step: TimedStep) -> list[int]:
    """What the caller gets, which a budget of planned arrays leaves out."""
    only = [
        array if array.kind is ArrayKind.OUTPUT else replace(array, size_bytes=0)
        for array in step.problem.arrays
    ]
    operators = tuple(replace(operator, workspace_bytes=0) for operator in step.problem.operators)
    return TimedStep(Problem(operators, tuple(only)), step.order, step.seconds).load_bytes.tolist()


def check_counts(step: TimedStep, answer: WithinBudgetAndLink, link: Link) -> None:
    """Check that bytes and times are those by which the planners of others are counted."""
    plan = plan_of(step, answer.transfers, link)
    swapped_steps.check(step, plan)
    assert answer.simulation == plan.simulation
    loads = map(int.__sub__, plan.load_bytes, output_bytes(step))
    assert answer.peak_bytes == max(loads)
    if answer.is_met:
        assert answer.bound.extra_seconds <= answer.extra_seconds + 1e-9


@given(timed_steps())
def test_bytes_and_gaps_are_those_of_the_planners_of_others(step):
    line = plain_timeline(lending(step))
    expected = map(int.__sub__, step.load_bytes.tolist(), output_bytes(step))
    assert line.resident_bytes == tuple(expected)
    assert list(line.gaps) == sorted(gap for gaps in step.gaps for gap in gaps if gap.size_bytes)


@settings(deadline=None, max_examples=50)
@given(timed_steps(), links, st.sampled_from([0.9, 0.7, 0.4]))
def test_plans_count_as_those_of_others(step, link, share):
    problem = lending(step)
    budget = int(share * plain_timeline(problem).peak_bytes)
    check_counts(step, least_time_of_swaps(problem, budget, link), link)
    check_counts(step, least_time_with_swaps(problem, budget, link), link)


@pytest.mark.parametrize("share", [0.8, 0.75, 0.7])
def test_weights_and_momenta_wait_between_steps(share):
    step = network_step(8)
    problem = lending(step)
    link = Link(6.0, 6.0)
    budget = int(share * step.peak_bytes)
    answer = least_time_with_swaps(problem, budget, link)
    check_counts(step, answer, link)
    assert answer.is_met
    assert any(transfer.back_before >= step.length for transfer in answer.transfers)
    autoswap = AutoSwap.of(step, link, least_bytes=0)
    scored = [autoswap.plan(budget, only(score)) for score in Score]
    assert answer.extra_seconds < min(plan.extra_seconds for plan in scored if plan.peak_bytes <= budget)
    # Without these arrays it takes longer.
    kept = replace(problem, lent=frozenset(), renewed=frozenset())
    alone = least_time_with_swaps(kept, budget - problem.lent_bytes, link)
    assert answer.extra_seconds < alone.extra_seconds


@st.composite
def timelines_across(draw):
    """Timelines of some operators with gaps in the step, and across two."""
    length = draw(st.integers(4, 12))
    seconds = draw(st.lists(st.sampled_from((0.0, 1.0, 2.5)), min_size=length, max_size=length))
    resident = [draw(st.integers(0, 5)) for _ in range(length)]
    gaps = []
    for array in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, length - 1))
        last = draw(st.integers(first + 1, first + length))
        size = draw(st.integers(1, 9))
        for timestep in range(length if last >= length else last + 1):
            resident[timestep] += size * (last >= length or timestep >= first)
        if last > first + 1:
            gaps.append(Gap(first, last, array, size))
    executions = plain_timeline(lending(network_step(3))).executions[:length]
    return Timeline(executions, tuple(seconds), tuple(resident), tuple(sorted(gaps)))


LINKS = st.sampled_from((Link(1.0, 1.0), Link(3.0, 6.0), Link(6.0, 2.0, 0.5), Link(1e9, 1e9)))


@given(timelines_across(), LINKS, st.sampled_from((0.5, 0.8)))
def test_what_is_chosen_stalls_nothing_in_any_step(line, link, share):
    chosen = choose(line, line.gaps, link, int(share * line.peak_bytes), lambda gap: 1.0)
    done = without_stalls(line, chosen, link)
    check(done.transfers, len(line.seconds))
    assert len(done.transfers) == len(chosen) == len(set(chosen))
    assert done.simulation.stalled_seconds <= 1e-9


def test_no_more_is_chosen_than_the_link_copies_in_each_step():
    """Ten arrays are accessed once in ten seconds; a copy of each takes 1.1 s."""
    executions = plain_timeline(lending(network_step(3))).executions[:10]
    gaps = tuple(Gap(timestep, timestep + 10, timestep, 11) for timestep in range(10))
    line = Timeline(executions, (1.0,) * 10, (110,) * 10, gaps)
    chosen = choose(line, gaps, Link(10.0, 10.0), 20, lambda gap: 1.0)
    assert len(chosen) == 9
    assert without_stalls(line, chosen, Link(10.0, 10.0)).simulation.stalled_seconds == 0
    assert without_stalls(line, gaps, Link(10.0, 10.0)).simulation.stalled_seconds > 0


@given(timelines_across(), LINKS, st.sampled_from((0.5, 0.7, 0.9)))
def test_a_budget_is_met_if_everything_away_meets_it(line, link, share):
    budget = int(share * line.peak_bytes)
    done = within_budget(line, line.gaps, link, budget)
    check(done.transfers, len(line.seconds))
    least = list(line.resident_bytes)
    for gap in line.gaps:
        for moment in range(gap.out_after + 1, gap.back_before):
            least[moment % len(least)] -= gap.size_bytes
    if max(least) <= budget:
        assert done.peak_bytes <= budget


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(timed_steps(), links)
def test_walks_leave_out_what_is_elsewhere(step, link):
    """The same bytes as with the transfers that the stays are of."""
    problem = lending(step)
    line = plain_timeline(problem)
    gaps = [gap for gap in line.gaps if gap.array in problem.lent]
    stays = stays_of(line, gaps, link, problem.lent)
    assume(stays)
    evaluator = Evaluator(prepare(replace(problem, stays=stays)))
    evaluator.evaluate(plain_states(evaluator.instance))
    walked = evaluator.trace.timestep_bytes[: step.length]
    expected = list(line.resident_bytes)
    for stay in stays:
        for position in range(stay.gone_before, stay.back_from):
            expected[position % step.length] -= step.problem.arrays[stay.array].size_bytes
    assert walked == expected
    assert min(expected) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_without_a_link_counts_what_is_lent(seed):
    problem = random_step(seed).problem
    lent = replace(problem, lent=frozenset({0, 1}))
    peak = max(plain_timeline(problem).resident_bytes)
    assert max(plain_timeline(lent).resident_bytes) == peak + lent.lent_bytes
    for budget in (peak * 3 // 4, peak):
        assert (
            lower_bound(lent, budget + lent.lent_bytes).extra_seconds
            == lower_bound(problem, budget).extra_seconds
        )


def test_parts_of_a_load_go_on_in_the_next_step():
    load = prepare_load()
    assert part_of(load, 1, 3).tolist() == [1, 2]
    assert part_of(load, 3, 6).tolist() == [3, 0, 1]
    assert part_of(load, 5, 7).tolist() == [1, 2]
    assert part_of(load, 2, 2).tolist() == []
    remove(load, 3, 6, 10)
    assert load.tolist() == [-10, -9, 2, -7]


def prepare_load():
    step = TimedStep(
        Problem(
            tuple(Operator(f"o{index}", index) for index in range(4)),
            (Array("a", 0, 0, (3,)),),
        ),
        tuple(range(4)),
        (1.0,) * 4,
    )
    return step.load_bytes


@pytest.mark.parametrize("names", [{"lent": frozenset({0})}, {"renewed": frozenset({5})}])
def test_only_what_the_caller_owns_is_lent(names):
    step = network_step(2)
    assert step.problem.arrays[0].kind is ArrayKind.PLANNED
    assert step.problem.arrays[5].kind is ArrayKind.PLANNED
    with pytest.raises(ProblemError, match="only static arrays"):
        replace(lending(step), **names)
