"""The benchmark of memory budgets gives other planners the same step, and shows their figures and ours."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from olla_fx.models import ModelCase
from tests.olla_solvers.recomputation.steps import chain

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    return module("budget_steps")


def module(name: str) -> ModuleType:
    """A script, as a module; scripts import one another."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


class Block(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )


class Network(nn.Module):
    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), *(Block(channels) for _ in range(blocks))
        )
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def case(blocks: int = 6, channels: int = 16) -> ModelCase:
    example = torch.randn(8, 3, 32, 32), torch.randint(5, (8,))
    return ModelCase(Network(blocks, channels), example, F.cross_entropy)


def test_what_the_partitioner_saves_is_kept_and_all_else_made_again(steps):
    pytorch = module("budget_pytorch")
    step = steps._step_of(case(), "a100", "none")
    graph, dataflow = step.captured.graph_module, step.recomputable.kept.dataflow
    by_budget = [
        pytorch.points_by_pytorch(graph, dataflow, step.problems, [budget]) for budget in (1.0, 0.5, 0.0)
    ]
    for knapsack in pytorch.KNAPSACKS:
        (most, half, least) = (points[knapsack][0] for points in by_budget)
        assert half[0] < most[0] <= 1.01 * step.peak_bytes
        assert 0 <= most[1] < half[1] < least[1] < 0.6
    # With nothing saved, each operator of forward that backward needs runs once more.
    evaluator = pytorch.Evaluator(pytorch.prepare(step.problems[0]))
    units = len(evaluator.instance.units.arrays)
    everything = evaluator.evaluate([pytorch.ONCE] * units)
    assert least[1] == pytest.approx(everything.extra_seconds / step.problems[0].step_seconds)


def test_checkpoints_lie_around_blocks(steps):
    plain, checkpointed = case(), case()
    assert steps._checkpoint_blocks(checkpointed.model) == 6
    before = steps._step_of(plain, "a100", "none")
    after = steps._step_of(checkpointed, "a100", "none")
    assert after.captured.recomputed > before.captured.recomputed == 0
    assert after.peak_bytes < before.peak_bytes
    assert after.problems[0].step_seconds > before.problems[0].step_seconds


def test_rewrites_are_made_where_they_are_asked_for(steps):
    model = nn.Sequential(nn.Linear(784, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4))
    wide = ModelCase(model, (torch.randn(2, 784), torch.randint(4, (2,))), F.cross_entropy)
    plain, rewritten = (steps._step_of(wide, "a100", rewrites) for rewrites in ("none", "all"))
    assert rewritten.peak_bytes < plain.peak_bytes


def test_a_sequence_without_blocks_is_cut_where_it_can_begin_again(steps):
    layers = [nn.Linear(4, 4), nn.ReLU(inplace=True)] * 5
    model = nn.ModuleDict({"body": nn.Sequential(*layers)})
    pieces = steps._checkpoint_blocks(model)
    blocks = [list(piece.block) for piece in model["body"]]
    assert pieces == len(blocks) > 1
    assert [layer for block in blocks for layer in block] == layers
    assert not any(getattr(block[0], "inplace", False) for block in blocks)


def test_who_is_behind_is_shown():
    tables = module("budget_tables")
    known = {
        "operators": 10,
        "peak_bytes": 100 << 20,
        "seconds": {"capture": 1.0, "ours": 2.0},
        "ours": [[50 << 20, 50 << 20, 0.10, 0.09, 40 << 20], [80 << 20, 79 << 20, 0.02, 0.02, 40 << 20]],
        "pytorch": {"dp": [[100 << 20, 0.0], [80 << 20, 0.04], [50 << 20, 0.2], [60 << 20, 0.3]]},
    }
    assert tables.compared(known) == [(80 << 20, 0.04, "dp"), (50 << 20, 0.2, "dp")]
    assert "(behind)" not in tables.tables({"net 1 none": known})
    assert "50 % less" in tables.tables({"net 1 none": known})
    known["pytorch"]["dp"][1][1] = 0.01
    assert "2.00 (behind)" in tables.tables({"net 1 none": known})


def test_all_that_swaps_gets_one_step_and_is_shown(monkeypatch):
    swapping = module("budget_swapping")
    monkeypatch.setattr(swapping, "SHARES", (0.8, 0.5))
    monkeypatch.setattr(swapping, "FINEST", 20)
    problem = chain(12, (1.0, 3.0))
    figures = swapping.by_swapping([problem], 130, [1e-8, 4e-8], dqn_seconds=0.2)
    for at_link in figures.values():
        plans = at_link["plans"]
        assert set(plans) == {"joint", "recomputation", "swap", "AutoSwap", "DQN"}
        for planner, points in plans.items():
            for share, point, joint in zip(swapping.SHARES, points, plans["joint"], strict=True):
                assert point is None or point[0] <= share * 130
                assert point is None or planner in ("AutoSwap", "DQN") or joint[1] <= point[1] + 1e-9
        for joint, alone in zip(at_link["least"]["joint"], at_link["least"]["recomputation"], strict=True):
            assert alone is None or joint <= alone
    known = {"peak_bytes": 130, "swapping": figures}
    text = swapping.swapping_tables({"chain 1 none": known, "other 1 all": {}})
    assert text.count("| chain 1 | joint | ") == text.count("| chain 1 | DQN | ") == 2
    assert "| step | over 4e-08 GB/s | 0.8 |" in text


def test_the_smallest_budget_within_extra_time_is_searched_by_halves():
    swapping = module("budget_swapping")
    asked = []

    def plan(budget_bytes: int) -> tuple[int, float] | None:
        asked.append(budget_bytes)
        return None if budget_bytes < 30 else (budget_bytes - 1, 0.01 * (100 - budget_bytes))

    assert swapping.least_within(0.4, 100, plan) == 59
    assert swapping.least_within(1.0, 100, plan) == 29
    assert swapping.least_within(-1.0, 100, plan) is None
    assert len(asked) <= 3 * 8
