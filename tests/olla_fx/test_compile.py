"""The pipeline: a step that is planned again begins from its earlier plan."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx, nn

import olla_fx
from olla_fx import compile as pipeline
from olla_solvers.plan import MemoryPlan
from olla_solvers.problem import Problem


def test_a_step_planned_again_begins_from_its_earlier_order(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, make_plan = [], pipeline.make_plan

    def recording(problem: Problem, **options: object) -> MemoryPlan:
        starts.append(options["start"])
        return make_plan(problem, **options)

    monkeypatch.setattr(pipeline, "make_plan", recording)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    step = olla_fx.optimize(
        model, example, loss_fn=nn.functional.cross_entropy, optimizer=optimizer, fallback="raise"
    )
    step(*example)
    step(*example)
    assert len(starts) == 2
    assert starts[0] is None
    assert sorted(starts[1]) == sorted(step.plan.order)


def test_a_planned_step_holds_one_graph() -> None:
    gc.collect()
    before = sum(type(held) is fx.Node for held in gc.get_objects())
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    step = olla_fx.optimize(model, torch.randn(3, 4), fallback="raise")
    for _ in range(3):
        step(torch.randn(3, 4)).square().sum().backward()
    gc.collect()
    held = sum(type(thing) is fx.Node for thing in gc.get_objects()) - before
    written = sum(len(graph_module.graph.nodes) for graph_module in step.stats.graph_modules)
    assert held < written
    assert step.stats.graph_modules == step.stats.graph_modules
