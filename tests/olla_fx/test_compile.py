"""The pipeline: a step that is planned again begins from its earlier plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
    step = olla_fx.optimize(model, example, loss_fn=nn.functional.cross_entropy, optimizer=optimizer)
    step(*example)
    step(*example)
    assert len(starts) == 2
    assert starts[0] is None
    assert sorted(starts[1]) == sorted(step.plan.order)
