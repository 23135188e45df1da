"""Orders of a step go on from each other's states where what is found is far from what is proven."""

import math
import random
from dataclasses import replace

import pytest

from olla_solvers.recomputation import compiled, planning
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.planning import Planner
from olla_solvers.recomputation.search import Search
from olla_solvers.recomputation.walk import ALWAYS, MOMENTS_FROM, MOST_MOMENTS
from tests.olla_solvers.recomputation.steps import chain, random_step, u_shaped


def random_order(draw: random.Random, problem) -> tuple[int, ...]:
    """Return an executable order that keeps the phases apart."""
    missing = [set(before) for before in problem.problem.predecessors]
    order: list[int] = []
    while len(order) < len(missing):
        ready = [operator for operator, before in enumerate(missing) if operator not in order and not before]
        phase = min(problem.phases[operator] for operator in ready)
        chosen = draw.choice([operator for operator in ready if problem.phases[operator] == phase])
        order.append(chosen)
        for before in missing:
            before.discard(chosen)
    return tuple(order)


def test_states_of_another_order_drop_the_same_in_front_of_the_same_operators():
    checked = 0
    for seed in range(200):
        draw = random.Random(seed)
        problem = random_step(seed, 14).problem
        here = Evaluator(prepare(replace(problem, order=random_order(draw, problem))))
        there = Evaluator(prepare(problem))
        if here.instance.units.arrays != there.instance.units.arrays or len(problem.order) < 4:
            continue
        positions = sorted(draw.sample(range(1, len(problem.order)), 3))
        dropped = [draw.choice((None, (0,), (1, 2))) for _ in there.instance.units.arrays]
        states = there.states_of(positions, dropped)
        translated = here.states_from(there, states)
        assert translated is not None
        for unit, places in enumerate(dropped):
            if places is None:
                assert translated[unit] == states[unit] <= ALWAYS
                continue
            bits = translated[unit] >> MOMENTS_FROM
            dropped_before = {
                here.instance.problem.order[position]
                for place, position in enumerate(here.flat.moments)
                if bits >> place & 1
            }
            assert dropped_before == {problem.order[positions[place]] for place in places}
            checked += 1
        assert there.states_from(here, translated) == states
    assert checked > 100


def test_more_moments_than_compiled_code_has_are_not_taken():
    late, early = u_shaped(12)
    here, there = (Evaluator(prepare(problem)) for problem in (early, late))
    units = len(there.instance.units.arrays)
    states = there.states_of([70], [(0,)] * units)
    here.states_of(range(1, MOST_MOMENTS + 1), [None] * units)
    assert here.states_from(there, states) is None
    assert len(here.flat.moments) == MOST_MOMENTS


@pytest.mark.skipif(not compiled.is_available(), reason="needs numba")
def test_a_budget_is_met_that_no_order_meets_in_its_first_turn(monkeypatch):
    problems = u_shaped(16)
    budget = int(0.45 * plain_peak(problems))
    met = []
    for exchanges in (0, planning.MOST_EXCHANGES):
        monkeypatch.setattr(planning, "MOST_EXCHANGES", exchanges)
        planner = Planner(problems, may_compile=True)
        planner.search(budget)
        met.append(planner.answer(budget).is_met)
    assert met == [False, True]


def plain_peak(problems) -> int:
    evaluators = [Evaluator(prepare(problem)) for problem in problems]
    return min(evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes for evaluator in evaluators)


def test_the_best_states_of_one_order_are_tried_in_the_others():
    late, early = (Search(prepare(problem), math.inf) for problem in u_shaped(12))
    late.drop_cheapest(int(0.8 * late.plain.peak_bytes))
    lowered = late.pool.lowest
    assert late.has_units_of(early)
    assert lowered.peak_bytes < early.pool.lowest.peak_bytes
    early.try_states_of(late, lowered.states)
    # With updates early it needs no more.
    assert early.pool.lowest.peak_bytes <= lowered.peak_bytes


def test_no_more_of_the_cheapest_is_dropped_than_a_budget_asks_for():
    problem = chain(32)
    search = Search(prepare(problem), math.inf)
    budget = search.plain.peak_bytes - 100
    search.drop_cheapest(budget)
    met = search.pool.fastest(budget)
    assert met is not None
    # Each of the layers takes as long and is as large, and one more is there while it is made again.
    assert met.extra_seconds <= 11
    assert met.peak_bytes > budget - 10


def test_all_are_dropped_if_a_budget_asks_for_it():
    problem = chain(8)
    search = Search(prepare(problem), math.inf)
    search.drop_cheapest(0)
    assert search.pool.lowest.peak_bytes < search.plain.peak_bytes
    assert search.evaluator.walks <= 12
