"""The portfolio: proofs, deadlines, large graphs, and TorchInductor's heuristics as the mark to meet."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olla_solvers.analysis import captured_order, peak_bytes, precedence_bound
from olla_solvers.order import order
from olla_solvers.order.bounds import mincut_bytes
from olla_solvers.order.contract import contract
from olla_solvers.order.flow import flow_of
from olla_solvers.order.greedy import RULES, best_order, free_first, list_schedule
from olla_solvers.order.inductor import HEURISTICS, dfs
from olla_solvers.order.portfolio import Portfolio
from olla_solvers.order.projection import Projection, key_operators
from olla_solvers.order.search import SearchRules, cut
from olla_solvers.order.search.cut import DeadlinePassedError, live_bytes, smallest_state
from olla_solvers.order.split import piece_between
from olla_solvers.order.stretch import StretchSearch
from olla_solvers.problem import Array, Operator, Problem
from tests.olla_solvers.graphs import Builder, alexnet_step, mlp_step, problems, smallest_peak, training_steps

MANY = settings(max_examples=100, deadline=None, derandomize=True)


def wide(count: int, window: int, seed: int = 0) -> Problem:
    """Every operator reads up to three of those shortly before it."""
    draw = random.Random(seed)
    readers: list[set[int]] = [set() for _ in range(count)]
    for reader in range(1, count):
        for _ in range(draw.randint(1, 3)):
            readers[draw.randrange(max(0, reader - window), reader)].add(reader)
    arrays = [Array(f"a{i}", 64 * draw.randint(1, 1000), i, tuple(sorted(readers[i]))) for i in range(count)]
    return Problem(tuple(Operator(f"op{i}") for i in range(count)), tuple(arrays))


def residual(blocks: int) -> Problem:
    """A chain of blocks with a shortcut around each, its gradients in reverse, and updates at the end."""
    step, updates = Builder(), []
    step.run("input", makes={"x0": 1000})
    for block in range(blocks):
        step.run(f"conv{block}", [f"x{block}"], {f"c{block}": 1000})
        step.run(f"relu{block}", [f"c{block}"], {f"r{block}": 1000})
        step.run(f"add{block}", [f"r{block}", f"x{block}"], {f"x{block + 1}": 1000})
    step.run("loss", [f"x{blocks}"], {f"g{blocks}": 1000})
    for block in reversed(range(blocks)):
        step.run(f"relu_grad{block}", [f"g{block + 1}", f"r{block}"], {f"d{block}": 1000})
        step.run(f"conv_grad{block}", [f"d{block}"], {f"e{block}": 1000})
        step.run(f"weight_grad{block}", [f"d{block}", f"x{block}"], {f"w{block}": 700 + block % 7})
        step.run(f"add_grad{block}", [f"e{block}", f"g{block + 1}"], {f"g{block}": 1000})
        updates.append(block)
    for block in updates:
        step.update(f"update{block}", [f"w{block}"], [f"conv{block}"])
    return step.build()


def is_executable(problem: Problem, sequence: Sequence[int]) -> bool:
    position = {operator: at for at, operator in enumerate(sequence)}
    return len(position) == len(problem.operators) and all(
        position[u] < position[v] for u, v in problem.edges
    )


@pytest.mark.parametrize("switched_off", ["contract", "split", "mincut", "projection"])
def test_the_portfolio_proves_without_a_rule(switched_off: str) -> None:
    @MANY
    @given(problems())
    def check(problem: Problem) -> None:
        flow, _ = flow_of(problem)
        portfolio = Portfolio(flow, float("inf"), SearchRules(**{switched_off: False}))
        portfolio.run_short()
        portfolio.run_long(program=False)
        assert portfolio.best.peak_bytes == portfolio.bound_bytes == smallest_peak(problem)
        assert flow.peak_bytes(portfolio.best.order) == portfolio.best.peak_bytes

    check()


def test_a_residual_network_is_proven() -> None:
    problem = residual(150)
    start = time.process_time()
    schedule = order(problem, solver="none")
    assert schedule.is_optimal
    assert is_executable(problem, schedule.order)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_time_limit_is_kept_on_a_wide_graph(limit: float) -> None:
    problem = wide(800, 100)
    start = time.monotonic()
    schedule = order(problem, time_limit=limit)
    assert time.monotonic() - start < limit + 2
    assert is_executable(problem, schedule.order)
    assert precedence_bound(problem) <= schedule.lower_bound_bytes <= schedule.peak_bytes
    assert schedule.peak_bytes == peak_bytes(problem, schedule.order)


def test_more_time_does_not_worsen_order_or_bound() -> None:
    problem = wide(300, 60)
    some, more = (order(problem, solver="none", time_limit=limit) for limit in (0.05, 3))
    assert more.peak_bytes <= some.peak_bytes
    assert more.lower_bound_bytes >= some.lower_bound_bytes
    assert more.lower_bound_bytes > precedence_bound(problem)


def plain_lpmf(problem: Problem) -> tuple[int, ...]:
    """TorchInductor's own loop: all that is ready is looked at in every step."""
    planned = problem.planned
    done: list[int] = []
    gap = 0
    made = [sum(a.size_bytes for a in planned if a.producer == v) for v in range(len(problem.operators))]

    def freed(operator: int) -> int:
        return sum(
            array.size_bytes
            for array in planned
            if [each for each in array.consumers if each not in done] == [operator]
            or (array.producer == operator and not array.consumers)
        )

    while len(done) < len(problem.operators):
        ready = [
            v
            for v in range(len(problem.operators))
            if v not in done and all(each in done for each in problem.predecessors[v])
        ]
        chosen = min(ready, key=lambda v: (made[v] if made[v] > gap else 0, made[v] - freed(v), v))
        gap = max(gap, made[chosen]) - made[chosen] + freed(chosen)
        done.append(chosen)
    return tuple(done)


@MANY
@given(problems(most=12))
def test_least_peak_memory_first_does_what_the_plain_loop_does(problem: Problem) -> None:
    assert HEURISTICS["lpmf"](problem) == plain_lpmf(problem)


def marks(problem: Problem) -> dict[str, int]:
    """Peaks that no order may exceed."""
    flow, captured = flow_of(problem)
    found = {name: peak_bytes(problem, heuristic(problem)) for name, heuristic in HEURISTICS.items()}
    for by_net in (True, False):
        plain = tuple(captured[each] for each in free_first(flow, by_net=by_net))
        assert is_executable(problem, plain)
        found[f"free first {by_net}"] = peak_bytes(problem, plain)
    return found


@pytest.mark.parametrize("solver", ["none", "auto", "highs"])
def test_no_time_is_too_short_to_be_as_good_as_any_heuristic(solver: str) -> None:
    graphs = [mlp_step(), alexnet_step(), residual(10), wide(60, 20), wide(300, 300), wide(3000, 3000)]
    for problem in graphs:
        schedule = order(problem, solver=solver, time_limit=0)
        assert is_executable(problem, schedule.order)
        assert schedule.peak_bytes <= min(marks(problem).values())


@MANY
@given(problems(most=12))
def test_heuristics_are_never_better(problem: Problem) -> None:
    assert order(problem, solver="none", time_limit=0).peak_bytes <= min(marks(problem).values())


def test_depth_first_starts_from_the_operators_that_touch_least() -> None:
    operators = tuple(Operator(name) for name in "ABCD")
    arrays = (Array("a", 9, 0, (2,)), Array("b", 5, 1, (3,)), Array("c", 1, 2, (3,)))
    problem = Problem(operators, arrays)
    assert dfs(problem) == (1, 0, 2, 3)
    assert HEURISTICS["bfs"](problem) == captured_order(problem)


@settings(MANY, max_examples=300)
@given(st.one_of(problems(most=9), training_steps()))
def test_projections_are_bounds_and_contain_the_cut_at_one_operator(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    optimum = smallest_peak(problem)
    projection = Projection(flow, 0)
    projection.run(optimum + 1, float("inf"))
    assert projection.is_done
    assert projection.bound_bytes <= optimum
    (first, *_) = key_operators(flow)
    low = flow.ancestors[first]
    high = (1 << flow.count) - 1 & ~flow.descendants[first] & ~(1 << first)
    least, _ = smallest_state(flow, low, high, live_bytes(flow, low), float("inf"))
    assert projection.bound_bytes >= least + flow.rise_bytes[first]


def test_a_projection_sees_what_no_cut_at_one_operator_does() -> None:
    """Of three operators that each turn two inputs into nothing, one must run while all inputs are alive."""
    pairs = [(one, other) for one in range(3) for other in range(one)]
    operators = tuple(Operator(f"make{i}") for i in range(3)) + tuple(Operator(f"use{i}") for i in range(3))
    arrays = [
        Array(f"a{i}", 10, i, tuple(3 + at for at, pair in enumerate(pairs) if i in pair)) for i in range(3)
    ]
    arrays += [Array(f"b{at}", 9, 3 + at, (6,)) for at in range(3)]
    problem = Problem((*operators, Operator("end")), tuple(arrays))
    flow, _ = flow_of(problem)
    cuts = mincut_bytes(flow, range(flow.count), 0, float("inf"))
    projection = Projection(flow, 0)
    projection.run(smallest_peak(problem), float("inf"))
    assert cuts < projection.bound_bytes <= smallest_peak(problem)


@settings(MANY, max_examples=50)
@given(problems(most=9), st.integers(1, 4))
def test_an_interrupted_projection_reaches_the_same_bound(problem: Problem, every: int) -> None:
    flow, _ = flow_of(problem)
    looks = 0

    def interrupt(deadline: float) -> None:
        nonlocal looks
        looks += 1
        if looks % (every + 1) and looks < 200:
            raise DeadlinePassedError

    at_once, in_turns = Projection(flow, 0), Projection(flow, 0)
    at_once.run(1 << 60, float("inf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "check_time", interrupt)
        while not in_turns.is_done:
            in_turns.run(1 << 60, float("inf"))
            assert in_turns.bound_bytes <= at_once.bound_bytes
    assert in_turns.bound_bytes == at_once.bound_bytes


@MANY
@given(problems(most=9), st.data())
def test_a_stretch_costs_what_it_does_in_the_order(problem: Problem, data: st.DataObject) -> None:
    flow, _ = flow_of(problem)
    sequence = list_schedule(flow, *RULES["least net"][:1])
    assert sequence is not None
    start = data.draw(st.integers(0, flow.count - 1))
    end = data.draw(st.integers(start + 1, flow.count))
    piece = piece_between(flow, sequence, start, end)
    number = {original: local for local, original in enumerate(piece.parts) if original is not None}
    before = [local for local, original in enumerate(piece.parts) if original is None and local == 0]
    inner = [*before, *(number[each] for each in sequence[start:end])]
    costs = piece.flow.costs([*inner, *(each for each in range(piece.flow.count) if each not in inner)])
    assert costs[len(before) : len(inner)] == flow.costs(sequence)[start:end]


@MANY
@given(problems(most=12), st.integers(0, 2000))
def test_searching_stretches_never_worsens_and_can_be_continued(problem: Problem, bound: int) -> None:
    flow, _ = flow_of(problem)
    optimum = Portfolio(flow, float("inf"))
    optimum.run_short()
    stretches, sequence = StretchSearch(flow), tuple(range(flow.count))
    found = stretches.run(sequence, bound, float("inf"))
    assert sorted(found) == list(sequence)
    assert all(found.index(u) < found.index(v) for v in sequence for u in flow.predecessors[v])
    assert flow.peak_bytes(found) <= flow.peak_bytes(sequence)
    # The longest stretch is the whole graph, which is small here.
    assert flow.peak_bytes(found) <= max(bound, optimum.best.peak_bytes)
    assert stretches.run(found, bound, 0.0) == found


def test_stretches_improve_what_greedy_finds_on_wide_graphs() -> None:
    problem = wide(400, 50)
    flow, _ = flow_of(problem)
    greedy = best_order(flow, 0, float("inf"))
    found = StretchSearch(flow).run(greedy.order, 0, time.monotonic() + 2)
    assert flow.peak_bytes(found) < greedy.peak_bytes


def test_contraction_that_runs_out_of_time_is_still_one() -> None:
    flow, _ = flow_of(residual(30))
    partial = contract(flow, deadline=0.0)
    assert partial.flow.count > contract(flow).flow.count
    assert sorted(partial.expand(range(partial.flow.count))) == list(range(flow.count))
