"""Problems and plans survive JSON, and every kind of bad document is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from olla_solvers.errors import ProblemError
from olla_solvers.plan_json import load_plan, plan_from_json, plan_to_json, save_plan
from olla_solvers.planner import make_plan
from olla_solvers.problem import Array, ArrayKind, Operator, Problem
from tests.olla_solvers.graphs import mlp_step, problems

GRAPH: dict[str, Any] = {
    "format": 1,
    "operators": [{"name": "A", "workspace": 8}, {"name": "B"}],
    "arrays": [
        {"name": "x", "size": 10, "producer": "A", "consumers": ["B"], "alignment": 2},
        {"name": "y", "size": 4, "producer": "B", "consumers": [], "kind": "output"},
        {"name": "w", "size": 4, "producer": None, "consumers": ["A"], "kind": "static"},
    ],
    "before": [["A", "B"]],
}


def test_every_field_is_read() -> None:
    problem = Problem.from_json(GRAPH)
    assert problem.operators == (Operator("A", 8), Operator("B"))
    assert problem.arrays[0] == Array("x", 10, 0, (1,), ArrayKind.PLANNED, 2)
    assert problem.before == ((0, 1),)
    assert problem.static_bytes == 4
    assert Problem.from_json(problem.to_json()) == problem


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_problems_and_plans_survive(problem: Problem) -> None:
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem
    plan = make_plan(problem, solver="none")
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


def test_files(tmp_path: Path) -> None:
    problem = mlp_step()
    problem.save(tmp_path / "graph.json")
    assert Problem.load(tmp_path / "graph.json") == problem
    plan = make_plan(problem, solver="cbc")
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    (tmp_path / "broken.json").write_text("{")
    for load in (Problem.load, load_plan):
        with pytest.raises(ProblemError, match=r"broken\.json"):
            load(tmp_path / "broken.json")
        with pytest.raises(ProblemError, match=r"absent\.json"):
            load(tmp_path / "absent.json")


def changed(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(document))
    target: Any = copy
    for step in path[:-1]:
        target = target[step]
    if value is None and path[-1] in target:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), 2, "unknown graph format 2"),
        (("extra",), 1, "unknown field 'extra'"),
        (("operators",), None, "'operators' must be a list"),
        (("operators",), [{"name": "A"}, {"name": "B"}, {"name": "A"}], "'A' occurs twice"),
        (("operators", 0, "workspace"), -1, "negative workspace"),
        (("operators", 0, "workspace"), "8", "must be of type int"),
        (("operators", 0, "size"), 8, "unknown field 'size'"),
        (("arrays", 0, "size"), None, "'size' must be of type int"),
        (("arrays", 0, "size"), -1, "negative size"),
        (("arrays", 0, "kind"), "huge", "unknown kind 'huge'"),
        (("arrays", 0, "producer"), "Z", "unknown operator 'Z'"),
        (("arrays", 0, "producer"), "B", "read by its own producer"),
        (("arrays", 0, "alignment"), 0, "alignment 0"),
        (("arrays", 2, "name"), "x", "'x' occurs twice"),
        (("arrays", 2, "kind"), "planned", "has no producer"),
        (("before",), [["B", "A"]], "cycle"),
        (("before",), [["A"]], "pair of operator names"),
        (("before",), 5, "'before' must be a list"),
        (("arrays", 0, "may_share"), ["y"], "unknown field 'may_share'"),
        (("arrays", 0, "producer"), ["A", "B"], "array 'x' names unknown operator"),
        (("arrays", 0, "size"), 2**62, r"reach 2\*\*62 B; the largest is that of array 'x'"),
        (("operators", 1, "workspace"), 2**80, "the workspace of operator 'B'"),
        (("before",), [["A", "A"]], "before itself"),
    ],
)
def test_bad_graphs_are_named(path: tuple[Any, ...], value: Any, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        Problem.from_json(changed(GRAPH, path, value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested"),
        ('{"format": 1, "format": 1}', "field 'format' occurs twice"),
        (
            '{"format": 1, "arrays": [{"name": "x", "producer": "A", "producer": "B"}]}',
            "'producer' occurs twice in 'x'",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ProblemError, match=rf"bad\.json: .*{words}"):
        Problem.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), 7, "unknown plan format 7"),
        (("order",), None, "lacks field 'order'"),
        (("extra",), 1, "unknown field 'extra'"),
        (("order",), [1], "'order' must be of type str"),
        (("offsets",), [], "'offsets' must be of type dict"),
        (("offsets", "h"), "0", "'offsets' must be of type int"),
        (("peak_bytes",), 1.5, "'peak_bytes' must be of type int"),
        (("provenance", "order_found_by"), None, "lacks field 'order_found_by'"),
        (("provenance", "order_solver", "status"), "odd", "'odd' is not a valid SolverStatus"),
    ],
)
def test_bad_plans_are_named(path: tuple[Any, ...], value: Any, words: str) -> None:
    good = plan_to_json(make_plan(mlp_step(), solver="none"))
    with pytest.raises(ProblemError, match=words):
        plan_from_json(changed(good, path, value))


def test_documents_must_be_objects() -> None:
    for read in (Problem.from_json, plan_from_json):
        with pytest.raises(ProblemError, match="must be a JSON object"):
            read([])  # type: ignore[arg-type]
