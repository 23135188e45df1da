"""The exact search against exhaustive enumeration, with every rule on and off."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.effort.deadline import DeadlinePassedError
from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.order.search import ALL_RULES, Alternation, SearchRules, engine, space
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import alexnet_step, mlp_step, problems, smallest_peak, training_steps

SEARCH = ("closure", "lazy", "forward", "backward", "probe")
ONE_WAY = [replace(ALL_RULES, probe=False, **{direction: False}) for direction in ("forward", "backward")]
COMBINATIONS = [
    ALL_RULES,
    *(replace(ALL_RULES, **{name: False}) for name in SEARCH),
    *ONE_WAY,
    *(replace(rules, **{name: False}) for rules in ONE_WAY for name in ("closure", "lazy")),
    *(replace(rules, closure=False, lazy=False) for rules in ONE_WAY),
]
MANY = settings(max_examples=50, deadline=None, derandomize=True)


def name_of(rules: SearchRules) -> str:
    return "without " + (" ".join(f.name for f in fields(rules) if not getattr(rules, f.name)) or "nothing")


def searched(flow: FlowGraph, rules: SearchRules) -> Alternation:
    search = Alternation(flow, range(flow.count), 0, rules)
    search.run(float("inf"))
    position = {operator: at for at, operator in enumerate(search.order)}
    assert sorted(position) == list(range(flow.count))
    assert all(position[u] < position[v] for v in position for u in flow.predecessors[v])
    assert flow.peak_bytes(search.order) == search.peak_bytes
    return search


def check(problem: Problem, *combinations: SearchRules) -> None:
    optimum = smallest_peak(problem)
    flow, _ = flow_of(problem)
    contracted = contract(flow)
    for rules in combinations:
        search = searched(flow, rules)
        assert search.peak_bytes == search.bound_bytes == optimum
        search = searched(contracted.flow, rules)
        assert max(search.peak_bytes, contracted.floor_bytes) == optimum
        assert max(search.bound_bytes, contracted.floor_bytes) == optimum


@pytest.mark.parametrize("rules", COMBINATIONS, ids=name_of)
def test_search_finds_and_proves_the_optimum(rules: SearchRules) -> None:
    @MANY
    @given(problems(most=9))
    def random_ones(problem: Problem) -> None:
        check(problem, rules)

    @MANY
    @given(training_steps())
    def training_shaped(problem: Problem) -> None:
        check(problem, rules)

    random_ones()
    training_shaped()


@MANY
@given(problems(most=9))
def test_bound_and_order_hold_whenever_the_search_is_stopped(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    optimum = smallest_peak(problem)
    search = Alternation(flow, range(flow.count), 0)
    peak, bound = search.peak_bytes, search.bound_bytes
    while not search.is_done:
        search.run(float("inf"), most_states=1)
        assert bound <= search.bound_bytes <= optimum <= search.peak_bytes <= peak
        peak, bound = search.peak_bytes, search.bound_bytes
    assert peak == bound == optimum


@settings(MANY, max_examples=150)
@given(st.one_of(problems(most=9), training_steps()), st.integers(1, 9), st.sampled_from(COMBINATIONS))
def test_a_search_interrupted_anywhere_goes_on_without_losing_its_proof(
    problem: Problem, every: int, rules: SearchRules
) -> None:
    """The clock is looked at in the middle of moves and cuts, too: each look may end the run."""
    flow, _ = flow_of(problem)
    looks = 0

    def interrupt(deadline: float) -> None:
        nonlocal looks
        looks += 1
        if looks % every == 0 and looks < 300:
            raise DeadlinePassedError

    search = Alternation(flow, range(flow.count), 0, rules)
    optimum = smallest_peak(problem)
    with pytest.MonkeyPatch.context() as patch:
        for module in (engine, space):
            patch.setattr(module, "check_time", interrupt)
        while not search.is_done:
            search.run(float("inf"), most_states=5)
            assert search.bound_bytes <= optimum <= search.peak_bytes
    assert search.peak_bytes == search.bound_bytes == optimum
    assert flow.peak_bytes(search.order) == optimum


@MANY
@given(problems(most=9))
def test_little_memory_ends_the_search_and_keeps_its_bound(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    search = Alternation(flow, range(flow.count), 0, most_memory_bytes=0)
    search.run(float("inf"))
    assert search.is_done
    assert search.bound_bytes <= smallest_peak(problem) <= search.peak_bytes


def test_a_passed_deadline_ends_the_search_at_once() -> None:
    flow, _ = flow_of(alexnet_step())
    search = Alternation(flow, range(flow.count), 0)
    search.run(time.monotonic() - 1)
    assert search.order == tuple(range(flow.count))
    assert not search.is_done


def test_a_deadline_that_passes_before_a_state_is_expanded_does_not_lose_it() -> None:
    flow, _ = flow_of(mlp_step())
    peak = searched(flow, ALL_RULES).peak_bytes
    search = engine.Search(space.Space(flow), ALL_RULES, peak, peak + 1, 1 << 20)
    assert search.run(1000, time.monotonic() - 1) is engine.Outcome.DEADLINE
    assert search.run(1000, float("inf")) is engine.Outcome.FOUND
    assert search.order is not None
    assert flow.peak_bytes(search.order) == peak


@pytest.mark.parametrize("rules", ONE_WAY, ids=name_of)
def test_either_direction_proves_small_steps(rules: SearchRules) -> None:
    for problem in (mlp_step(), alexnet_step()):
        flow, _ = flow_of(problem)
        search = searched(contract(flow).flow, rules)
        assert search.peak_bytes == search.bound_bytes == searched(flow, ALL_RULES).peak_bytes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_graphs_are_proven_with_every_rule_on_and_off() -> None:
    @settings(max_examples=5000, deadline=None, derandomize=True)
    @given(problems(most=9))
    def random_ones(problem: Problem) -> None:
        check(problem, *COMBINATIONS)

    @settings(max_examples=1000, deadline=None, derandomize=True)
    @given(training_steps())
    def training_shaped(problem: Problem) -> None:
        check(problem, *COMBINATIONS)

    random_ones()
    training_shaped()
