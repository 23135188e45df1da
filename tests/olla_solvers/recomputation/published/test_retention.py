import itertools

import pytest

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp import backends
from olla_solvers.plan import SolverStatus
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.published import retention_program
from olla_solvers.recomputation.published.methods import METHODS
from olla_solvers.recomputation.published.retention import solve_retention
from olla_solvers.recomputation.published.retention_program import RetentionProgram
from olla_solvers.recomputation.published.segments import segments
from tests.olla_solvers.recomputation.exhaustive import Exhaustive
from tests.olla_solvers.recomputation.published.chains import chain, residual_chain
from tests.olla_solvers.recomputation.published.retained_sets import RetainedSets
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import random_step

needs_highs = pytest.mark.skipif(not backends.is_installed("highs"), reason="needs HiGHS")


def interesting_steps(seeds, most_operators=8):
    """Small steps whose peak repetitions lower, budgets, and the best of all states of the evaluator."""
    for seed in seeds:
        step = random_step(seed, most_operators)
        instance = prepare(step.problem)
        units = len(instance.units.arrays)
        if not 0 < units < 6:
            continue
        evaluator = Evaluator(instance)
        plain = evaluator.evaluate(plain_states(instance)).peak_bytes
        every = [evaluator.evaluate(states) for states in itertools.product(range(3), repeat=units)]
        every = [evaluation for evaluation in every if evaluation.is_valid]
        least = min(evaluation.peak_bytes for evaluation in every)
        if least < plain:
            for budget in sorted({least - 1, least, (least + plain) // 2}):
                within = [each.extra_seconds for each in every if each.peak_bytes <= budget]
                yield step, instance, budget, min(within, default=None)


def check_against_brute_force(solver, seeds):
    checked = 0
    for step, instance, budget, of_states in interesting_steps(seeds):
        report = solve_retention(step.problem, budget, solver=solver, time_limit=30)
        check_answer(step, report.plan)
        exhaustive = RetainedSets(instance, budget)
        slots = [(slot.position, slot.unit) for slot in RetentionProgram(instance, budget).slots]
        least = exhaustive.in_slots(slots)
        if least is None:
            assert report.is_impossible
            assert report.status is SolverStatus.INFEASIBLE
            assert of_states is None
        else:
            assert report.is_optimal
            assert report.plan.peak_bytes <= budget
            assert report.plan.extra_seconds == report.bound_seconds == least
            assert of_states is None or least <= of_states or not report.is_complete
            assert exhaustive.anywhere() <= least
        checked += 1
    assert checked


@needs_highs
def test_the_program_finds_what_brute_force_finds():
    check_against_brute_force("highs", range(20))


@pytest.mark.slow
@needs_highs
def test_the_program_finds_what_brute_force_finds_in_hundreds_of_steps():
    check_against_brute_force("highs", range(20, 400))


@pytest.mark.parametrize("solver", ["cbc", "gurobi"])
def test_other_solvers_find_it_too(solver):
    if not backends.is_installed(solver):
        pytest.skip(f"needs {solver}")
    check_against_brute_force(solver, range(4))


def test_of_all_sequences_in_the_order_few_take_less_than_the_program():
    equal = checked = 0
    for step, instance, budget, of_states in interesting_steps(range(60), 6):
        if of_states is None or len(step.problem.problem.planned) > 7:
            continue
        slots = [(slot.position, slot.unit) for slot in RetentionProgram(instance, budget).slots]
        of_program = RetainedSets(instance, budget).in_slots(slots)
        of_all = Exhaustive(step).least_seconds(budget, orders=False)
        assert of_program is not None
        assert of_all <= of_program <= of_states
        equal += of_all == of_program
        checked += 1
    assert equal >= 0.75 * checked > 5


def test_no_states_of_the_evaluator_take_less_than_what_the_slots_allow():
    # In steps 253 and 346 a phase has still to read a part of a unit when the next one begins.
    incomplete = 0
    for _, instance, budget, of_states in interesting_steps([*range(100), 253, 346], 10):
        program = RetentionProgram(instance, budget)
        incomplete += not program.is_complete
        if of_states is not None and program.is_complete:
            slots = [(slot.position, slot.unit) for slot in program.slots]
            least = RetainedSets(instance, budget).in_slots(slots)
            assert least is not None
            assert least <= of_states
    assert 0 < incomplete < 30


def holds(row, values):
    left = sum(values[column] * factor for column, factor in row.terms)
    slack = 1e-6
    return {
        "<=": left <= row.right + slack,
        ">=": left >= row.right - slack,
        "==": abs(left - row.right) <= slack,
    }[row.sense]


def test_a_known_plan_is_a_solution_of_the_program():
    for layers, budget in ((16, 9), (16, 12), (25, 10)):
        problem = chain(layers)
        program = RetentionProgram(prepare(problem), budget)
        plan = segments(problem, budget)
        assert program.start_from(plan)
        start = program.model.start
        assert None not in start
        assert all(holds(row, start) for row in program.model.rows)
        assert start[program.model.objective] == pytest.approx(plan.extra_seconds * program.cost_of_second)
        decoded = program.decode(start)
        assert [(each.operator, each.copy) for each in decoded] == [
            (each.operator, each.copy) for each in plan.executions
        ]


def test_states_of_random_steps_are_solutions_of_the_program():
    started = 0
    for seed in range(200):
        step = random_step(seed, 8)
        evaluator = Evaluator(prepare(step.problem))
        for states in itertools.islice(
            itertools.product(range(3), repeat=len(evaluator.instance.units.arrays)), 30
        ):
            if not evaluator.evaluate(states).is_valid:
                continue
            plan = evaluator.recomputation(states)
            program = RetentionProgram(evaluator.instance, plan.peak_bytes)
            if program.start_from(plan):
                assert all(holds(row, program.model.start) for row in program.model.rows), (seed, states)
                started += 1
    assert started > 1000


@needs_highs
def test_a_chain_of_16_layers_in_9_results():
    report = solve_retention(chain(16), 9, solver="highs")
    assert report.is_optimal
    assert report.plan.extra_seconds == 8
    assert report.plan.extra_seconds < segments(chain(16), 9).extra_seconds


@needs_highs
def test_a_known_plan_is_kept_if_there_is_no_time():
    known = segments(residual_chain(16), 12)
    report = solve_retention(residual_chain(16), 12, solver="highs", time_limit=0.1, start=known)
    assert report.plan.peak_bytes <= 12
    assert report.plan.extra_seconds <= known.extra_seconds
    assert report.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT


@needs_highs
def test_a_step_that_is_too_large_gets_the_best_known_plan(monkeypatch):
    monkeypatch.setattr(retention_program, "MOST_SLOTS", 10)
    report = solve_retention(chain(16), 9, solver="highs")
    assert report.status is SolverStatus.FAILED
    assert report.bound_seconds is None
    assert report.plan.peak_bytes <= 9
    assert METHODS["retention-highs"](chain(16), 9) == report.plan


def test_an_unknown_solver_is_refused():
    with pytest.raises(SolverUnavailableError):
        solve_retention(chain(4), 3, solver="nobody")


@needs_highs
def test_with_a_slot_for_each_unit_the_program_still_answers(monkeypatch):
    monkeypatch.setattr("olla_solvers.recomputation.published.slots.MOST_VISITS", 3)
    incomplete = 0
    for step, _, budget, of_states in interesting_steps(range(20)):
        report = solve_retention(step.problem, budget, solver="highs", time_limit=30)
        check_answer(step, report.plan)
        assert report.is_impossible or report.is_optimal
        assert of_states is None or report.plan.peak_bytes <= budget or not report.is_complete
        incomplete += not report.is_complete
    assert incomplete > 2
