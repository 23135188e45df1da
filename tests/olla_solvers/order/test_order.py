"""Orders against exhaustive enumeration: greedy, bound, contraction, splitting and the program."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.analysis import captured_order, peak_bytes, precedence_bound
from olla_solvers.errors import SolverUnavailableError
from olla_solvers.graph.contract import contract
from olla_solvers.graph.flow import FlowGraph, flow_of
from olla_solvers.graph.minimum_cut import bits_of, live_bytes
from olla_solvers.graph.split import split
from olla_solvers.ilp import backends
from olla_solvers.order import order
from olla_solvers.order.bounds import mincut_bound, mincut_bytes
from olla_solvers.order.greedy import RULES, best_order, list_schedule
from olla_solvers.order.projection import Projection
from olla_solvers.plan import SolverEffect, SolverStatus
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import alexnet_step, mlp_step, problems, smallest_peak, training_steps

MANY = settings(max_examples=400, deadline=None, derandomize=True)
FEW = settings(max_examples=12, deadline=None, derandomize=True)


def smallest_flow_peak(flow: FlowGraph) -> int:
    """The same exhaustive answer for a flow graph."""
    best = {0: 0}
    states = [0]
    for state in states:
        for operator in range(flow.count):
            if state >> operator & 1 or any(not state >> p & 1 for p in flow.predecessors[operator]):
                continue
            alive = sum(
                array.size_bytes
                for array in flow.arrays
                if state >> array.producer & 1 and any(not state >> c & 1 for c in array.consumers)
            )
            cost = max(best[state], alive + flow.rise_bytes[operator])
            following = state | 1 << operator
            if following not in best:
                states.append(following)
            best[following] = min(best.get(following, cost), cost)
    return best[(1 << flow.count) - 1]


def is_executable(problem: Problem, sequence: tuple[int, ...]) -> bool:
    position = {operator: at for at, operator in enumerate(sequence)}
    return len(position) == len(problem.operators) and all(
        position[u] < position[v] for u, v in problem.edges
    )


@MANY
@given(problems())
def test_orders_without_a_program_are_proven_and_bounds_hold(problem: Problem) -> None:
    schedule = order(problem, solver="none")
    optimum = smallest_peak(problem)
    assert is_executable(problem, schedule.order)
    assert schedule.peak_bytes == peak_bytes(problem, schedule.order)
    assert schedule.lower_bound_bytes == optimum == schedule.peak_bytes
    assert schedule.proved_by in ("precedence bound", "exact search", "min-cut bound")
    assert precedence_bound(problem) <= mincut_bound(problem) <= optimum


@MANY
@given(problems())
def test_greedy_lies_between_optimum_and_captured(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    found = best_order(flow, 0, float("inf"))
    assert smallest_peak(problem) <= found.peak_bytes <= peak_bytes(problem, captured_order(problem))


@MANY
@given(problems())
def test_mincut_bounds_hold_without_contraction(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    bound = mincut_bytes(flow, range(flow.count), 0, float("inf"))
    assert precedence_bound(problem) <= bound <= smallest_peak(problem)
    assert mincut_bytes(flow, range(flow.count), 0, 0.0) >= precedence_bound(problem)
    cuts = (smallest_cut(flow, operator) for operator in range(flow.count))
    assert bound == max(cuts)


def smallest_cut(flow: FlowGraph, operator: int) -> int:
    """What an operator costs from the best of all states that it can run from."""
    low, after = flow.ancestors[operator], flow.descendants[operator] | 1 << operator
    free = [each for each in range(flow.count) if not (low | after) >> each & 1]
    best = []
    for chosen in range(1 << len(free)):
        state = low | sum(1 << each for at, each in enumerate(free) if chosen >> at & 1)
        if all(not flow.ancestors[each] & ~state for each in bits_of(state)):
            best.append(live_bytes(flow, state))
    return min(best) + flow.rise_bytes[operator]


@MANY
@given(problems())
def test_flow_graph_and_contraction_keep_the_smallest_peak(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    contracted = contract(flow)
    optimum = smallest_peak(problem)
    assert smallest_flow_peak(flow) == optimum
    assert max(smallest_flow_peak(contracted.flow), contracted.floor_bytes) == optimum
    assert sorted(contracted.expand(range(contracted.flow.count))) == list(range(flow.count))


@MANY
@given(problems())
def test_an_expanded_order_costs_what_the_contracted_one_does(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    contracted = contract(flow)
    inner = tuple(range(contracted.flow.count))
    expected = max(contracted.flow.peak_bytes(inner), contracted.floor_bytes)
    assert flow.peak_bytes(contracted.expand(inner)) == expected


@MANY
@given(problems())
def test_pieces_hold_the_smallest_peak(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    pieces = split(flow)
    operators = [operator for piece in pieces for operator in piece.expand(range(piece.flow.count))]
    assert sorted(operators) == list(range(flow.count))
    assert max(smallest_flow_peak(piece.flow) for piece in pieces) == smallest_peak(problem)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_makes_executable_orders(rule: str) -> None:
    for problem in (mlp_step(), alexnet_step()):
        flow, captured = flow_of(problem)
        key, backwards = RULES[rule]
        found = list_schedule(flow, key, backwards=backwards)
        assert found is not None
        assert is_executable(problem, tuple(captured[each] for each in found))


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_the_program_finds_the_optimum(solver: str) -> None:
    @FEW
    @given(problems())
    def check(problem: Problem) -> None:
        schedule = order(problem, solver=solver)
        assert schedule.peak_bytes == smallest_peak(problem) == schedule.lower_bound_bytes
        assert schedule.solver.status is SolverStatus.OPTIMAL
        assert schedule.solver.bound_bytes == schedule.peak_bytes
        assert schedule.solver.variables > 0

    check()


@pytest.mark.parametrize("solver", ["cbc", "highs", "gurobi"])
def test_alexnet_is_proven_by_every_solver(solver: str) -> None:
    problem = alexnet_step()
    assert len(problem.operators) == 69
    captured = peak_bytes(problem, captured_order(problem))
    schedule = order(problem, solver=solver)
    assert schedule.is_optimal
    assert schedule.peak_bytes < captured * 0.7
    assert schedule.solver.status is SolverStatus.OPTIMAL
    assert schedule.solver.effect is SolverEffect.CONFIRMED
    assert schedule.solver.gap == 0


def test_gurobi_solves_the_mlp() -> None:
    schedule = order(mlp_step(), solver="gurobi")
    assert schedule.is_optimal
    assert schedule.solver.solver == "gurobi"
    assert schedule.solver.status is SolverStatus.OPTIMAL


def test_gurobi_beyond_its_licence_names_cbc() -> None:
    with pytest.raises(SolverUnavailableError, match=r"too large .* solver='cbc'"):
        order(crossed(40), solver="gurobi")


def crossed(width: int) -> Problem:
    """Two layers in which every operator of the second reads three of the first: nothing contracts."""
    operators = [Operator(f"make{i}") for i in range(width)] + [Operator(f"use{i}") for i in range(width)]
    arrays = [
        Array(f"a{i}", 50 + 13 * i % 29, i, tuple(sorted({width + (i + k) % width for k in (0, 1, 5)})))
        for i in range(width)
    ]
    end = len(operators)
    arrays += [Array(f"b{i}", 40 + 11 * i % 37, width + i, (end,)) for i in range(width)]
    return Problem((*operators, Operator("end")), tuple(arrays))


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_a_time_limit_keeps_the_incumbent(solver: str) -> None:
    problem = crossed(22)
    flow, _ = flow_of(problem)
    greedy = best_order(flow, 0, float("inf"))
    start = time.monotonic()
    schedule = order(problem, solver=solver, time_limit=2)
    assert time.monotonic() - start < 5
    assert is_executable(problem, schedule.order)
    assert schedule.peak_bytes <= greedy.peak_bytes
    assert schedule.lower_bound_bytes >= precedence_bound(problem)
    assert schedule.solver.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT


def test_a_program_that_takes_too_long_to_state_is_not_waited_for() -> None:
    problem = crossed(130)
    start = time.monotonic()
    schedule = order(problem, solver="highs", time_limit=0.3)
    assert time.monotonic() - start < 3
    assert schedule.solver.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT
    assert "not given to highs" in schedule.solver.detail
    assert is_executable(problem, schedule.order)


def test_cbc_survives_a_limit_in_its_root_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_own_limit", lambda time_limit: 1.0)
    report = order(crossed(22), solver="cbc", time_limit=30).solver
    assert report.status is SolverStatus.TIME_LIMIT_WITH_INCUMBENT
    assert report.detail == "Stopped on time limit"
    assert report.bound_bytes is not None


def test_auto_runs_no_program_where_the_bound_proves_greedy() -> None:
    schedule = order(alexnet_step())
    assert schedule.proved_by == "precedence bound"
    assert schedule.solver.status is SolverStatus.NOT_RUN


@FEW
@given(problems())
def test_auto_is_never_worse_than_greedy(problem: Problem) -> None:
    schedule = order(problem, time_limit=10)
    assert schedule.peak_bytes == schedule.lower_bound_bytes == smallest_peak(problem)


def test_trivial_problems() -> None:
    assert order(Problem((), ()), solver="none").peak_bytes == 0
    lonely = Problem((Operator("A", 7), Operator("B")), ())
    for solver in ("none", "cbc"):
        schedule = order(lonely, solver=solver)
        assert schedule.peak_bytes == schedule.lower_bound_bytes == 7
    assert order(Problem((), ()), solver="cbc").is_optimal


def test_files_may_list_operators_in_any_sequence() -> None:
    problem = Problem((Operator("B"), Operator("A")), (Array("x", 4, 1, (0,)),))
    assert captured_order(problem) == (1, 0)
    assert order(problem, solver="none").order == (1, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bounds_hold_on_thousands_of_graphs() -> None:
    @settings(max_examples=5000, deadline=None, derandomize=True)
    @given(st.one_of(problems(most=9), training_steps()))
    def check(problem: Problem) -> None:
        optimum = smallest_peak(problem)
        flow, _ = flow_of(problem)
        projection = Projection(flow, 0)
        projection.run(optimum + 1, float("inf"))
        assert projection.bound_bytes <= optimum
        assert precedence_bound(problem) <= mincut_bound(problem) <= optimum
        assert mincut_bytes(flow, range(flow.count), 0, float("inf")) <= optimum

    check()
