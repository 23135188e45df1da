"""The ordering program against exhaustive enumeration, with every technique on and off."""

from __future__ import annotations

import os
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from olla_solvers.graph.flow import flow_of
from olla_solvers.ilp import backends, solver_process
from olla_solvers.ilp.order_columns import operator_spans, windows
from olla_solvers.ilp.order_program import order_program, variables_needed
from olla_solvers.ilp.techniques import ALL_TECHNIQUES, LITERAL, Techniques
from olla_solvers.paper.ordering import Anchors, order_with_techniques
from olla_solvers.paper.program_size import ProgramSize, program_size
from olla_solvers.problem import Problem
from tests.olla_solvers.graphs import alexnet_step, problems, smallest_peak, training_steps

SWITCHES = tuple(field.name for field in fields(Techniques) if field.name != "resident_sets")
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def techniques(draw: st.DrawFn) -> Techniques:
    """Any combination that keeps the optimum."""
    return Techniques(**{name: draw(st.booleans()) for name in SWITCHES})


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve solvers without a process for each of thousands of runs."""

    def run(folder: str, time_limit: float | None) -> tuple[bool, str]:
        here = Path.cwd()
        os.chdir(folder)
        try:
            with warnings.catch_warnings():
                # PuLP 3.3 announces what 4 will rename.
                warnings.simplefilter("ignore", DeprecationWarning)
                solver_process.main("request.json", "response.json")
        finally:
            os.chdir(here)
        return True, ""

    monkeypatch.setattr(backends, "_run_process", run)


def check(problem: Problem, chosen: Techniques, solver: str, anchors: Anchors = Anchors.NONE) -> None:
    schedule = order_with_techniques(problem, solver=solver, techniques=chosen, anchors=anchors)
    assert schedule.solver.objective_bytes == schedule.solver.bound_bytes == smallest_peak(problem)
    assert schedule.peak_bytes == smallest_peak(problem)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("name", [*SWITCHES, "early_updates", "paper's anchors", "all", "none"])
def test_the_program_finds_the_optimum_without_a_technique(name: str, solver: str) -> None:
    chosen = {"all": ALL_TECHNIQUES, "none": LITERAL}.get(name)
    if chosen is None:
        chosen = replace(ALL_TECHNIQUES, contract=False, pieces=False)
        chosen = replace(chosen, **({name: False} if name in SWITCHES else {}))
    anchors = Anchors.NONE if name in ("early_updates", "none") else Anchors.SAFE

    @settings(SETTINGS, max_examples=10)
    @given(problems(), training_steps(most=3))
    def compare(problem: Problem, step: Problem) -> None:
        for graph in (problem, step):
            if name == "paper's anchors":
                schedule = order_with_techniques(
                    graph, solver=solver, techniques=chosen, anchors=Anchors.PAPER
                )
                assert schedule.peak_bytes >= smallest_peak(graph)
                assert schedule.solver.bound_bytes is None
            else:
                check(graph, chosen, solver, anchors)

    compare()


@pytest.mark.usefixtures("in_process")
@SETTINGS
@given(problems(), techniques(), st.sampled_from([Anchors.NONE, Anchors.SAFE]))
def test_any_combination_finds_the_optimum(problem: Problem, chosen: Techniques, anchors: Anchors) -> None:
    check(problem, chosen, "highs", anchors)


@SETTINGS
@given(problems(most=9), techniques())
def test_columns_and_rows_are_counted_without_making_them(problem: Problem, chosen: Techniques) -> None:
    flow, _ = flow_of(problem)
    program = order_program(flow, range(flow.count), chosen)
    assert variables_needed(flow, chosen) == len(program.model.lower)
    assert program_size(flow, chosen) == ProgramSize(len(program.model.lower), len(program.model.rows))
    for row in program.model.rows:
        value = sum(factor * (program.model.start[column] or 0) for column, factor in row.terms)
        assert {"<=": value <= row.right, "==": value == row.right, ">=": value >= row.right}[row.sense]


@pytest.mark.parametrize("name", ["spans", "useful_lifetimes", "preserved", "precedence", "shared_outputs"])
def test_each_technique_takes_columns_away(name: str) -> None:
    flow, _ = flow_of(alexnet_step())
    fewer, more = (
        windows(flow, chosen) for chosen in (ALL_TECHNIQUES, replace(ALL_TECHNIQUES, **{name: False}))
    )
    assert fewer.columns < more.columns


@SETTINGS
@given(problems(most=9))
def test_spans_by_ancestors_lie_within_those_by_distances(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    pairs = zip(operator_spans(flow), operator_spans(flow, precedence=False), strict=True)
    assert all(wide.lower <= narrow.lower < narrow.upper <= wide.upper for narrow, wide in pairs)


@SETTINGS
@given(problems())
def test_function_1_names_an_operator_for_each_of_its_arrays(problem: Problem) -> None:
    flow, _ = flow_of(problem)
    program = order_program(flow, range(flow.count), replace(LITERAL, spans=True))
    values = [0.0 if value is None else value for value in program.model.start]
    twice = program.lifetimes.execution_sequence(values, remove_duplicates=False)
    assert list(twice) == [
        operator for operator in range(flow.count) for _ in range(max(1, len(flow.outputs[operator])))
    ]
    assert program.decode(values) == tuple(range(flow.count))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("in_process")
def test_thousands_of_graphs_are_solved_with_every_technique_on_and_off() -> None:
    @settings(SETTINGS, max_examples=5000)
    @given(problems(most=9), techniques())
    def random_ones(problem: Problem, chosen: Techniques) -> None:
        check(problem, chosen, "highs")

    @settings(SETTINGS, max_examples=1000)
    @given(training_steps(), techniques())
    def training_shaped(problem: Problem, chosen: Techniques) -> None:
        check(problem, chosen, "highs")

    random_ones()
    training_shaped()
