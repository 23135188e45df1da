"""Large steps are planned in a process of their own, with compiled walks where numba is installed."""

import math
import subprocess
import sys
import time

import pytest

from olla_solvers.effort import apart
from olla_solvers.recomputation import compiled, least_time
from olla_solvers.recomputation.evaluate import Evaluator, plain_states
from olla_solvers.recomputation.instance import prepare
from olla_solvers.recomputation.planning import Planner
from tests.olla_solvers.recomputation.steps import chain

LAYERS = 300


def plain_peak(problem) -> int:
    evaluator = Evaluator(prepare(problem))
    return evaluator.evaluate(plain_states(evaluator.instance)).peak_bytes


def long_chain():
    return chain(LAYERS, (1.0, 3.0, 2.0, 1.5))


@pytest.mark.skipif(not compiled.is_available(), reason="needs numba")
def test_compiled_walks_find_more_at_a_low_budget():
    problem = long_chain()
    budget = plain_peak(problem) // 12
    plain = Planner([problem])
    plain.search(budget)
    faster = Planner([problem], may_compile=True)
    faster.search(budget)
    answer, compiled_answer = plain.answer(budget), faster.answer(budget)
    assert compiled_answer.is_met
    assert not answer.is_met or (
        compiled_answer.recomputation.extra_seconds <= answer.recomputation.extra_seconds
    )


@pytest.mark.skipif(not compiled.is_available(), reason="needs numba")
def test_neither_numba_nor_a_solver_is_loaded_by_who_plans():
    program = f"""
import sys
from olla_solvers.recomputation.least_time import least_time
from tests.olla_solvers.recomputation.steps import chain
answer = least_time(chain({LAYERS}, (1.0, 3.0, 2.0, 1.5)), {plain_peak(long_chain()) // 12}, solver="highs")
assert answer.is_met
assert not {{"numba", "highspy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_the_answer_of_the_process_is_the_same_each_time():
    problem = long_chain()
    budget = plain_peak(problem) // 6
    answers = [least_time.least_time(problem, budget, solver="none", seed=3) for _ in range(2)]
    assert answers[0] == answers[1]


def test_without_a_process_it_is_planned_here(monkeypatch):
    monkeypatch.setattr(apart, "last_answer", lambda *_: None)
    problem = chain(60, (1.0, 3.0, 2.0))
    answer = least_time.least_time(problem, plain_peak(problem) // 2)
    assert answer.is_met
    assert answer.recomputation.extra_seconds > 0


def test_each_answer_that_the_process_hands_over_is_one_for_all_budgets():
    problem = long_chain()
    budgets = (plain_peak(problem) // 2, plain_peak(problem), plain_peak(problem) // 10)
    offers = []
    least_time.curve_apart((problem,), budgets, math.inf, 1.0, 0, None, offers.append)
    assert len(offers) > 1
    for answers in offers:
        assert tuple(answer.budget_bytes for answer in answers) == budgets
        assert answers[1].recomputation.extra_seconds == 0
    seconds = [answer.recomputation.extra_seconds for answer in offers[-1]]
    assert offers[-1][0].is_met
    assert seconds[1] < seconds[0] < seconds[2]


def test_a_deadline_is_kept():
    problem = chain(3000, (1.0, 3.0, 2.0))
    began = time.monotonic()
    answer = least_time.least_time(problem, plain_peak(problem) // 20, deadline=began + 4)
    # The process is ended a moment after; then its answer, or the plain order's, is stated.
    assert time.monotonic() - began < 4 + 6
    assert answer.recomputation.executions


def test_nothing_is_compiled_where_no_folder_keeps_it(monkeypatch):
    def refuse():
        raise RuntimeError("cannot cache function 'walk': no locator available for file")

    monkeypatch.setattr(compiled, "compiled_walk", refuse)
    assert not compiled.is_ready(math.inf)


def test_without_numba_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    assert not compiled.is_ready(math.inf)


@pytest.mark.skipif(not compiled.is_available(), reason="needs numba")
def test_what_was_not_compiled_yet_is_not_begun_shortly_before_a_deadline(monkeypatch):
    monkeypatch.setattr(compiled, "_kept_files", lambda function: iter(()))
    assert not compiled.is_ready(time.monotonic() + 5)
    assert compiled.is_ready(time.monotonic() + 1000)
