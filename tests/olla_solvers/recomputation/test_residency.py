import itertools
import math
import time

import pytest

from olla_solvers.errors import SolverUnavailableError
from olla_solvers.ilp import backends
from olla_solvers.recomputation.bounds import lower_bound
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.least_time import curve, least_time
from olla_solvers.recomputation.residency import (
    CLOSE,
    moment_of_any_order,
    propose,
    solver_for,
)
from olla_solvers.recomputation.residency_program import COST_OF_STEP, ResidencyProgram, makers_of_operators
from tests.olla_solvers.recomputation.exhaustive import Exhaustive
from tests.olla_solvers.recomputation.simulate import check_answer
from tests.olla_solvers.recomputation.steps import chain, random_step


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Solvers write files to the working folder."""
    monkeypatch.chdir(tmp_path)


def plain_peak(problem) -> int:
    evaluator = Evaluator(prepare(problem))
    return evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes


def check_seeds(seeds: range) -> tuple[int, int]:
    """Compare with all sequences and states; return the bounds that rose and the optima compared."""
    higher = optima = 0
    for seed in seeds:
        step = random_step(seed, 7)
        if len(step.problem.problem.planned) > 8:
            continue
        evaluator = Evaluator(prepare(step.problem))
        exhaustive = Exhaustive(step)
        peak = plain_peak(step.problem)
        for budget in (peak - 1, peak * 3 // 4):
            bound = lower_bound(step.problem, budget)
            if bound.operator is None or bound.is_impossible:
                continue
            proposals = propose([evaluator.instance], bound, "highs", work=20.0)
            proven = proposals.bound.extra_seconds
            assert bound.extra_seconds <= proven <= exhaustive.least_seconds(budget) + 1e-9
            higher += proven > bound.extra_seconds
            for proposal in proposals.states:
                states = evaluator.states_of(proposal.positions, proposal.dropped)
                evaluation = evaluator.evaluate(states)
                if evaluation.is_valid:
                    check_answer(step, evaluator.recomputation(states))
                if proposal.is_optimal:
                    assert evaluation.peak_bytes <= budget
                if proposal.is_optimal and len(evaluator.instance.units.arrays) <= 5:
                    assert evaluation.extra_seconds <= fastest(evaluator, budget) + slack(step.problem)
                    optima += 1
    return higher, optima


def fastest(evaluator: Evaluator, budget: int) -> float:
    units = len(evaluator.instance.units.arrays)
    walks = map(evaluator.evaluate, itertools.product(range(4), repeat=units))
    within = [walk.extra_seconds for walk in walks if walk.is_valid and walk.peak_bytes <= budget]
    return min(within, default=math.inf)


def slack(problem) -> float:
    return 2 * CLOSE * problem.step_seconds


def test_no_sequence_is_below_the_bound_and_no_states_of_the_order_below_an_optimum():
    higher, optima = check_seeds(range(250))
    assert higher > 10
    assert optima > 4


def check_moments(seeds: range) -> None:
    """Compare programs of several moments with programs of single ones, and with all sequences."""
    for seed in seeds:
        step = random_step(seed, 8)
        if len(step.problem.problem.planned) > 8:
            continue
        instance = prepare(step.problem)
        budget = plain_peak(step.problem) * 3 // 4
        moments = []
        for operator in step.problem.order:
            if step.problem.phases[operator] and all(
                not moment.has_run[operator] and moment.is_to_come[operator] for moment in moments
            ):
                moments.append(moment_of_any_order(instance, operator, budget))
        single = max((optimum(instance, [moment]) for moment in moments), default=0.0)
        several = optimum(instance, moments) if moments else 0.0
        assert single - 1e-6 <= several <= Exhaustive(step).least_seconds(budget) + 1e-6


def optimum(instance, moments) -> float:
    """Return the seconds of a program's solution, infinite if there is none."""
    program = ResidencyProgram(instance, makers_of_operators(instance), moments)
    solution = backends.solve_here(program.model, "highs")
    if solution.objective is None:
        return math.inf
    return solution.objective / COST_OF_STEP * instance.problem.step_seconds


def test_no_sequence_is_below_programs_of_several_moments():
    check_moments(range(150))


def test_two_moments_say_more_than_single_ones():
    problem = chain(10, (1.0, 1.3, 0.7))
    instance = prepare(problem)
    budget = plain_peak(problem) * 2 // 5
    late = [operator for operator in problem.order if problem.phases[operator]]
    moments = [moment_of_any_order(instance, operator, budget) for operator in late]
    assert max(optimum(instance, [moment]) for moment in moments) == pytest.approx(7.0)
    assert optimum(instance, [moments[1], moments[6]]) == pytest.approx(7.3)


def test_what_takes_more_than_is_of_use_is_not_looked_for():
    problem = chain(40, (1.0, 1.3, 0.7))
    instance, bound = prepare(problem), lower_bound(problem, plain_peak(problem) // 2)
    evaluator = Evaluator(instance)
    (found,) = propose([instance], bound, "highs", work=20.0).states
    least = evaluator.evaluate(evaluator.states_of(found.positions, found.dropped)).extra_seconds
    assert found.is_optimal
    for share, is_beaten in ((0.99, True), (1.01, False)):
        proposals = propose([instance], bound, "highs", work=20.0, most_seconds=share * least)
        assert proposals.is_beaten is is_beaten


@pytest.mark.slow
def test_no_sequence_of_thousands_of_steps_is_below_programs_of_several_moments():
    check_moments(range(150, 3000))


@pytest.mark.slow
def test_no_sequence_of_thousands_of_steps_is_below_the_bound():
    check_seeds(range(250, 3000))


def test_half_of_a_long_chain_is_met_as_fast_as_is_proven():
    problem = chain(40, (1.0, 1.3, 0.7))
    budget = plain_peak(problem) // 2
    answer = least_time(problem, budget, solver="highs")
    assert answer.is_met
    assert answer.gap_seconds <= slack(problem)
    without = least_time(problem, budget, solver="none")
    assert answer.recomputation.extra_seconds <= without.recomputation.extra_seconds + slack(problem)
    assert answer.bound.extra_seconds >= without.bound.extra_seconds


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_solvers_agree(solver):
    problem = chain(30, (1.0, 1.3, 0.7))
    bound = lower_bound(problem, plain_peak(problem) * 2 // 3)
    proposals = propose([prepare(problem)], bound, solver, work=30.0)
    assert proposals.states
    assert proposals.bound.extra_seconds == pytest.approx(8.3, abs=slack(problem))


def test_budgets_of_a_curve_may_have_moments_of_their_own():
    problem = chain(40, (1.0, 1.3, 0.7))
    peak = plain_peak(problem)
    answers = curve(problem, [peak * share // 20 for share in (19, 17, 14, 10)], solver="highs")
    seconds = [answer.recomputation.extra_seconds for answer in answers]
    assert seconds == sorted(seconds)
    assert all(answer.is_met for answer in answers)


def test_a_short_deadline_leaves_it_at_what_minimum_cuts_prove():
    problem = chain(40)
    bound = lower_bound(problem, plain_peak(problem) // 2)
    assert propose([prepare(problem)], bound, "highs", work=1.0, by_the_clock=1.0).bound is bound
    deadline = time.monotonic() + 0.5
    answer = least_time(problem, plain_peak(problem) // 2, deadline=deadline, solver="highs")
    assert answer.recomputation.executions


def test_a_solver_that_is_not_there_is_an_error():
    with pytest.raises(SolverUnavailableError, match="unknown solver 'glpk'"):
        solver_for("glpk")


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [(("cbc", "gurobi", "highs"), "highs"), (("cbc", "gurobi"), "cbc"), (("gurobi",), "gurobi"), ((), None)],
)
def test_the_first_solver_that_is_installed_is_taken(installed, chosen, monkeypatch):
    monkeypatch.setattr(backends, "is_installed", installed.__contains__)
    assert solver_for("auto") == chosen
    assert solver_for("none") is None


def test_without_a_solver_budgets_are_met(monkeypatch):
    problem = chain(40, (1.0, 1.3, 0.7))
    budget = plain_peak(problem) // 2
    monkeypatch.setattr(backends, "is_installed", lambda solver: False)
    answer = least_time(problem, budget)
    assert answer.is_met
    assert answer == least_time(problem, budget, solver="none")
    with pytest.raises(SolverUnavailableError, match="'highs' is not installed"):
        least_time(problem, budget, solver="highs")


def test_a_licence_that_takes_no_such_program_leaves_it_at_what_was_found(monkeypatch):
    problem = chain(30, (1.0, 1.3, 0.7))
    bound = lower_bound(problem, plain_peak(problem) * 2 // 3)
    monkeypatch.setattr(backends, "may_take", lambda solver, columns, rows: False)
    proposals = propose([prepare(problem)], bound, "gurobi", work=20.0)
    assert proposals.bound is bound
    assert not proposals.states


def test_the_lowest_is_looked_for_though_the_budget_is_impossible():
    problem = chain(40, (1.0, 1.3, 0.7))
    answer = least_time(problem, 1, solver="highs")
    assert answer.bound.is_impossible
    assert answer.recomputation.peak_bytes < plain_peak(problem) // 2
